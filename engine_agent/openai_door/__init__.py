"""The OpenAI-compatible door of an engine agent: vLLM's own API app, behind the agent's gate. Off unless asked for."""
