"""`weightplane demo`: the main job on one machine, every part of it a real process."""
