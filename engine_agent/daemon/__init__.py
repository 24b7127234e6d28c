"""The process: what an agent is made of by its settings, its session with the coordinator, its restarts and metrics."""
