"""The simulated fleet: that its scenarios pass, what it found once, and that it sees faults planted in the cores.

`planted_engines` and `planted_fleets` are cores that break one rule each; a rule of the witness without one there has
not been shown to see anything. Scenarios themselves are the product's (`controlplane.sim.scenarios`).
"""
