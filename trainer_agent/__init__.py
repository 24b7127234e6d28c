"""The trainer's side.

`rank` is what lives inside a training process (no gRPC); `agent` is the process beside it; `megatron` exports models;
`demo` trains one. What both sides share is here: the source's port, segments, chunks, the local socket's messages.
"""
