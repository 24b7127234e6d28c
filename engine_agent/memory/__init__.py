"""The engine in memory: the real one's fast twin, under the same contract suite.

For tests, and for fleets of hundreds on one machine. What the port's contract does not say it must not do either: a
test that passes with it and could not with vLLM is worth nothing.
"""
