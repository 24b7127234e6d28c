"""Training loops over a fleet, short enough to read. `python -m examples.run NAME` runs one on this machine."""
