"""`weightplane demo`: the main job on one machine, every part of it a real process.

It starts what a user would start, by the same settings: nothing of it may be simulated, and nothing else may need it.
"""
