"""The engine's side: the one writer of one engine's weights, and the one judge of its health.

`daemon` is the process, `services` its gRPC, `life` one incarnation of the engine, `receivers` how bytes come in.
Behind the port in `engine` stand `vllm` (and `members`, where it spans nodes), `external` and `memory`; `openai_door`
is a second way in for requests. Nothing here decides: events go to `controlplane.core.engine_core`, and its effects are
carried out. Another engine is another implementation of the port, another way for bytes another receiver; what may be
claimed, and when a gate is open, is changed in the core alone.
"""
