"""When a writer hears that chunks are free (INV-12): each release speaks for every chunk up to its own.

Promises: where somebody's memory waits for it, a release goes out as soon as its chunk is free; where the bytes came in
the frame itself none does, and releases are held back while frames keep coming, MAX_HELD of them and HELD_SECONDS at
most. A message back for each MiB costs nearly as much as the half of what receiving it does. Nothing is said of a chunk
that is not free.
"""

from __future__ import annotations

from controlplane.core.versions import WeightVersion
from engine_agent.services import update_frames as frames
from weightplane.v1 import weight_update_pb2

MAX_HELD = 16
"""Chunks that one release speaks for."""
HELD_SECONDS = 0.01
"""A writer that waits for its chunk's release waits so much longer; one that goes on sending waits for nothing."""


class Releases:
    """Of one stream."""

    def __init__(self, version: WeightVersion, *, hold: bool) -> None:
        """`hold`: nobody's memory waits for a release."""
        self._version = version
        self._most = MAX_HELD if hold else 1
        self._held = 0
        self._index = -1

    def free(self, index: int) -> None:
        """This chunk is, and so is every one before it."""
        self._held, self._index = self._held + 1, index

    @property
    def held(self) -> bool:
        """There is one to be said."""
        return self._held > 0

    @property
    def due(self) -> bool:
        """It is to be said now, whatever comes next."""
        return self._held >= self._most

    def take(self) -> weight_update_pb2.UpdateWeightsResponse:
        """The release of all that is free."""
        assert self._held, "asked for only then"
        self._held = 0
        return frames.released(self._version, self._index)
