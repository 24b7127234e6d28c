"""Memory of a device that one process exports and another one of the same host opens: a port, and CUDA behind it."""
