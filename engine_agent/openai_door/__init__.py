"""The OpenAI-compatible door of an engine agent: vLLM's own API app, behind the agent's gate. Off unless asked for.

Routes, formats and answers are vLLM's, and are not written here; which of them may be reached is in `door`. Requests go
the way of every other (`services.entry`, `life.requests`), so their tokens have versions too; nothing here can change
one (INV-2).
"""
