"""A push under way: what a rank holds from the moment its weights were read until the fleet's decision, and after it.

    pending = rank.push_async(step)   # the weights may change from here on
    ...                               # train
    report = pending.applied()

Promises: every wait has a deadline and is heard to its end, whatever else the agent says meanwhile; the push's own
memory is settled in the moment that its result is read, and not before (INV-12), though `released` may be said earlier,
where this rank kept two chunks only and the agent has read the last of them. Nothing here runs by itself: what
the agent said is read when it is asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from controlplane.core.errors import DeadlineExceeded, WeightplaneError
from trainer_agent import wire
from trainer_agent.rank.link import Patience, RankLink
from trainer_agent.rank.memory import NOTHING
from trainer_agent.rank.report import PushReport, failure_of, report_of, undecided
from weightplane.local.v1 import rank_pb2
from weightplane.v1 import version_pb2

HEALS = "nobody waited for this push, so it is not repeated: the next one brings whole weights to every engine"


class PendingPush:
    """One push of one rank. Made by `TrainerRank.push_async`."""

    def __init__(
        self,
        link: RankLink,
        *,
        sequence: int,
        step: int,
        seconds: float,
        settle: Callable[[int, rank_pb2.PushResult], None],
        detached: bool,
    ) -> None:
        self.sequence = sequence
        self.step = step
        self._link = link
        self._seconds = seconds
        self._settle = settle
        self._detached = detached
        self._started = time.monotonic()
        self._took = 0.0
        self._served: rank_pb2.PushServing | None = None
        self._unread: int | None = None
        """As `Feed.unread`."""
        self._version = version_pb2.WeightVersion()
        self.result: rank_pb2.PushResult | None = None
        """The agent's answer, once it was read."""
        self.told = False
        """Somebody asked how it ended, and heard it."""

    @property
    def done(self) -> bool:
        """Whether the fleet has decided, or the push failed; without waiting. Raises what ended the session."""
        self._read(lambda: self.result is not None)
        return self.result is not None

    def released(self, timeout: float | None = None) -> None:
        """Wait until nobody reads this push's memory any more. Says nothing of how it ends, or ended.

        The weights themselves may change since `push_async` returned; this is the copy of them. Where engines or a
        checkpoint read a whole version here (shared memory, deltas) that is when the fleet decided; of bytes that were
        sent (inline, broadcast) it is when they were.

        Raises:
            DeadlineExceeded: not within `timeout` seconds (None: the rank's `push_timeout`).
            StaleTerm, PeerLost: the session is over.
        """
        self._until(lambda: self._free, self._patience(timeout), "push", "nobody to read its memory any more")

    def so_far(self) -> PushReport:
        """As `applied` if the fleet has decided; else a report that says UNDECIDED. Raises as `applied`."""
        if self.done:
            return self.applied(0)
        return undecided(self._version, self.step, time.monotonic() - self._started)

    def applied(self, timeout: float | None = None) -> PushReport:
        """Wait until the fleet decided.

        Raises:
            UpdateFailed and whatever else `TrainerRank.push` raises; a note on it says if the next push heals.
            DeadlineExceeded: it is not decided within `timeout` seconds (None: the rank's `push_timeout`).
        """
        return self._report(self._patience(timeout))

    def serving(self, timeout: float | None = None) -> PushReport:
        """Wait until an engine takes requests under the version.

        Raises:
            As `applied`; DeadlineExceeded also when no engine did, or a later version took over before one was seen.
        """
        return self.served(self._patience(timeout))

    def served(self, patience: Patience) -> PushReport:
        """As `serving`."""
        version, waited_for = self._report(patience).version, "an engine that serves {}"
        self._until(lambda: self._served is not None, patience, "serving", waited_for.format(version))
        served = self._served
        assert served is not None, "just waited for"
        if served.error_reason:
            raise wire.typed_error(served.error_reason, served.error_metadata, served.error_message)
        if not served.engine_ids:
            waited = round(time.monotonic() - self._started, 1)
            raise DeadlineExceeded(phase="serving", waited_for=waited_for.format(version), waited_seconds=waited)
        return self._report(patience)

    def decided(self, patience: Patience) -> rank_pb2.PushResult:
        """The agent's answer, waited for. Raises as `released`."""
        self._until(lambda: self.result is not None, patience, "push", "the fleet's decision")
        assert self.result is not None, "just waited for"
        return self.result

    def take(self, message: rank_pb2.RankResponse) -> bool:
        """Whether a message of the agent is this push's; it is kept then."""
        if message.HasField("push_result") and message.push_result.sequence == self.sequence:
            self.end(message.push_result)
            return True
        if message.HasField("push_serving") and message.push_serving.sequence == self.sequence:
            self._served = message.push_serving
            return True
        if message.HasField("chunk_released") and message.chunk_released.sequence == self.sequence:
            if self._unread is not None and message.chunk_released.index >= self._unread:
                self._unread = NOTHING
            return True
        return False

    @property
    def _free(self) -> bool:
        return self.result is not None or self._unread == NOTHING

    def read(self, version: version_pb2.WeightVersion, unread: int | None) -> None:
        """This rank's weights were read, and will be that version. `unread`: as `Feed.unread`."""
        self._version, self._unread = version, unread

    def end(self, result: rank_pb2.PushResult) -> None:
        """The answer. The first counts."""
        if self.result is None:
            self.result, self._took = result, time.monotonic() - self._started
            self._settle(self.sequence, result)

    def _report(self, patience: Patience) -> PushReport:
        result, self.told = self.decided(patience), True
        if result.error_reason:
            error = failure_of(result)
            if self._detached and result.retry:
                error.add_note(HEALS)
            raise error
        serving = tuple(self._served.engine_ids) if self._served is not None else ()
        return report_of(result, self.step, self._took, serving)

    def _until(self, came: Callable[[], bool], patience: Patience, phase: str, waited_for: str) -> None:
        while not came():
            self._read(came)
            if not came():
                self._link.wait(patience, phase, waited_for)

    def _read(self, came: Callable[[], bool]) -> None:
        """Take in what is there. What was said before the session's end is worth more than that end."""
        try:
            while self._link.poll() is not None:
                pass  # of a push that nobody holds any more
        except WeightplaneError:
            if not came():
                raise

    def _patience(self, timeout: float | None) -> Patience:
        return Patience(self._seconds if timeout is None else timeout)
