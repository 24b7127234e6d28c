"""The engine in memory: the real one's fast twin, under the same contract suite."""
