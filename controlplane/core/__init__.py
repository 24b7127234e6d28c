"""Every decision, pure: a state and `handle(event, now)`, which returns effects.

`engine_core.EngineCore` decides for an engine agent, `fleet.FleetCore` for the coordinator; the files around each hold
one part of it: events, effects, state, and one file a subject. Beside them stand the values that both speak of
(`versions`, `layout`, `plan`, `errors`) and rules that are asked by themselves (`access`, `rates`, `pins`, `lag`).

To be changed here: what is decided, and with it the invariant's test and mutant. Not to be brought here: I/O, a clock,
randomness, asyncio, protobuf; they come in as arguments and events. A refusal leaves the state as it was. Each branch
is reached by a test (`make coverage`).
"""
