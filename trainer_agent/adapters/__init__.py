"""Other projects' shapes over `TrainerRank`: vLLM's trainer engines and client, the updaters of vime and slime.

Names, arguments and return values here are those projects' own, unused arguments too. Nothing is decided: a shape that
needs more than `TrainerRank` has needs it there.
"""
