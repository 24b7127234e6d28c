"""Memory of a rank that sends deltas: the version that the fleet committed last, room for the next and what differs.

Promises: only what the fleet committed becomes the base (INV-5), and it is never written while it is one. What somebody
may still read is not written either (INV-12): as the base it stays, and is unlinked after. It takes two whole copies of
what the rank exports, and room for deltas of at most DELTA_WORTH of a third.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer_agent.segments import Segment, SegmentNames, create
from weightplane.v1 import weight_update_pb2 as pb


@dataclass(frozen=True, slots=True)
class Kept:
    """A version's bytes."""

    name: pb.Base
    """Which version, and its content."""
    segment: Segment
    reusable: bool
    """Nobody but this rank reads it."""


class KeptVersions:
    """In place of a SegmentPool where deltas are wanted."""

    def __init__(self, run_id: str, rank: int) -> None:
        self._names = SegmentNames(run_id, rank)
        self.base: Kept | None = None
        """What the fleet committed last, as far as this rank exported it."""
        self._next: Segment | None = None
        self._spare: Segment | None = None
        self._used: list[Segment] = []
        self._free: list[Segment] = []
        """Room for deltas: in this push, and left over from earlier ones."""

    def acquire(self, byte_count: int) -> Segment:
        """Room for the next version. Raises LimitExceeded."""
        if self._next is not None:  # the last push ended without a word
            self._next.unlink()
        spare, self._spare = self._spare, None
        if spare is not None and spare.byte_count < byte_count:
            spare.unlink()
            spare = None
        self._next = spare or create(self._names.next(), byte_count)
        return self._next

    def place(self, byte_count: int) -> Segment:
        """Room for a chunk of the difference. Raises LimitExceeded."""
        fits = next((s for s in self._free if s.byte_count >= byte_count), None)
        if fits is None:
            fits = create(self._names.next(), byte_count)
        else:
            self._free.remove(fits)
        self._used.append(fits)
        return fits

    def settle(self, released: bool, committed: pb.Base | None) -> None:
        """The push ended. `committed`: the fleet serves what `acquire` gave room for; this is its name.

        After a push that failed there is no base: the next one is whole, and heals whatever the failure was.
        """
        self._settle_places(released)
        old, self.base = self.base, None
        fresh, self._next = self._next, None
        if committed is not None and fresh is not None:
            self.base = Kept(committed, fresh, released)
        else:
            self._put_back(fresh, reusable=released)
        if old is not None:
            self._put_back(old.segment, reusable=old.reusable)

    def _settle_places(self, released: bool) -> None:
        used, self._used = self._used, []
        if released:
            self._free += used
        else:
            for segment in used:
                segment.unlink()

    def _put_back(self, segment: Segment | None, *, reusable: bool) -> None:
        if segment is None:
            return
        if reusable and self._spare is None:
            self._spare = segment
        else:
            segment.unlink()

    def close(self) -> None:
        """Unlink whatever there is."""
        base = None if self.base is None else self.base.segment
        for segment in (base, self._next, self._spare, *self._used, *self._free):
            if segment is not None:
                segment.unlink()
        self.base, self._next, self._spare, self._used, self._free = None, None, None, [], []
