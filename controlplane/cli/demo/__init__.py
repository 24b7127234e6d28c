"""`weightplane demo`: the main job on one machine, every part of it a real process.

It uses nothing that a user could not: the daemons' own commands, the rollout client, a `TrainerRank` in a loop. What
would be needed here and nowhere else does not belong in it.
"""
