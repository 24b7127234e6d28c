"""The trainer's side.

`rank` is what lives inside a training process (no gRPC); `agent` is the process beside it. They know each other by the
messages of `weightplane.local.v1` alone: what both need stands here, beside the rooms (the source's port, transports,
parts of a plan, segments, chunks, the local socket's frames). `sources` and `megatron` give a model's tensors, under
the names of its checkpoint and bit for bit; `adapters` has other projects' shapes over all that; `demo` trains one.

What a version is, whether it commits and what an engine holds is never decided on this side.
"""
