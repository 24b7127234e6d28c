"""vLLM behind the engine's port: its front end in the agent's process, and in vLLM's own the pieces that it loads.

What vLLM offers is called, never written again: its layerwise reload, its IPC engine, its pause. Its internals are used
here and in `openai_door` (and in `lineage`, of one process that loads no plugin), so that another version of vLLM
changes nothing else. Nothing here knows of terms, served sets or gates. `calls`, `install`, `streams` and `power` run
in the agent; `plugin`, `scheduler`, `worker`, `transfer` and what that is made of (`loading`, `packing`, `experts`,
`mapping`, `streamed`, `cuda_ipc`) inside vLLM's processes, `routes` in a server that others run; `settings` and
`likeness` import neither vLLM nor torch.
"""
