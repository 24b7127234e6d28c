"""Frames that no honest peer sends, at every service of real servers: they stay up, stay small, and answer by the book.

`messages.py` makes them from the contract's own descriptors, `servers.py` is what they are sent to, in a process of its
own, `run.py` sends them and judges: `python -m tests.fuzz.run`.
"""
