"""Memory of a device that one process exports and another one of the same host opens: a port, and CUDA behind it.

`port` is what is asked of a device's runtime, `cuda` answers, `ranges` are the places that both sides tell each other.
Another kind of device is another file beside `cuda`. When memory may be written again is never decided here (INV-12).
"""
