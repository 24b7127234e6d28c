"""A seeded simulator of a whole fleet around the pure cores.

`runner.run(seeds, events, settings)` gives a `Report`: what was violated, and what was never reached. One seed replays
one history. `world` puts the processes together, `kernel` is time and network, `witness` judges, `scenarios` are fixed.
"""
