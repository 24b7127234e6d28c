"""What a daemon's addresses can be refused with."""

from __future__ import annotations


class PortUnavailable(OSError):
    """The address could not be bound: somebody listens there, or it is not of this host."""
