"""The gRPC services of an agent: frames and requests in, events to the life, answers out. No decisions.

A service checks what it was sent before anything is touched, and ends what it began when its caller is gone (INV-3).
What is refused is refused by the core's errors.
"""
