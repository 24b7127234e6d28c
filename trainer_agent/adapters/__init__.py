"""Other projects' shapes over `TrainerRank`: vLLM's trainer engines and client, the updaters of vime and slime."""
