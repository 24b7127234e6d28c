"""Other projects' shapes over the rollout client. They import none of those projects: their objects are known by their
fields."""
