"""Rows with real vLLM engines: the fleet, the engine that can be asked for its bare load, and the weights."""
