"""The pushes of one rank, one after the other: their memory, and who may still ask what became of one.

Promises: memory is settled once for each push, by what was said of just that one (INV-12); whatever ends a push, the
ranks that can do so end their iteration, so that none is left waiting in a collective.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from weakref import WeakValueDictionary

import structlog
from structlog.contextvars import bound_contextvars

from controlplane.core.canary import CanaryReference
from controlplane.core.errors import InvalidRequest, LinkFailed, PeerLost, WeightplaneError
from controlplane.core.layout import Layout
from controlplane.core.pauses import PausePolicy
from controlplane.rpc.codec import pause_to_proto
from controlplane.rpc.engine_codec import reference_to_proto
from trainer_agent.rank.feed import Feed, Held, Tensors, drain
from trainer_agent.rank.inbox import PushEnded
from trainer_agent.rank.link import Patience, RankLink
from trainer_agent.rank.pending import PendingPush
from trainer_agent.rank.times import Times
from trainer_agent.source import WeightSource
from weightplane.local.v1 import rank_pb2

log = structlog.get_logger(__name__)

ANSWER_GRACE_SECONDS = 15.0
"""What a rank waits beyond its own limit: the agent ends the wait first, and says why."""
TOLD_SECONDS = 1.0
"""For times, which nobody waits for."""
MAX_CAUSE_LENGTH = 4096
"""Of an exception's text on its way to the other ranks."""


@dataclass(frozen=True, slots=True)
class PushOptions:
    """One push, as the trainer's loop asked for it; see `TrainerRank.push`."""

    step: int
    detached: bool = False
    """Nobody waits for the decision: it is not repeated."""
    check: bool = False
    serving: bool = False
    """An engine that takes requests under it is waited for."""
    reference: CanaryReference | None = None
    pause: PausePolicy | None = None

    def require_valid(self) -> None:
        """Raises InvalidRequest: before anything is sent."""
        if self.pause is not None and self.pause.problem_at_an_install:
            raise InvalidRequest(field="pause", problem=self.pause.problem_at_an_install)
        problem = "" if self.reference is None else self.reference.problem()
        if problem:
            raise InvalidRequest(field="reference", problem=problem)

    def message(self, sequence: int, limit_seconds: float, held: Held) -> rank_pb2.PushBegin:
        return rank_pb2.PushBegin(
            step=self.step,
            timeout_seconds=limit_seconds,
            sequence=sequence,
            detached=self.detached,
            check=self.check,
            serving=self.serving,
            keeps_whole=held.keeps_whole,
            base=held.base,
            reference=None if self.reference is None else reference_to_proto(self.reference),
            pause=None if self.pause is None else pause_to_proto(self.pause),
        )


class Pushes:
    """Not for use by several threads."""

    def __init__(self, link: RankLink, rank: int, layout: Layout, source: WeightSource, held: Held) -> None:
        self.held = held
        """Segments, groups and links: they live through all pushes."""
        self._link = link
        self._rank = rank
        self._layout = layout
        self._source = source
        self._sequence = 0
        self._asked: WeakValueDictionary[int, PendingPush] = WeakValueDictionary()
        """Pushes that somebody may still ask, by sequence: what the agent says of them is kept."""
        self._last: PendingPush | None = None
        """The latest push whose weights were read."""
        self._unsettled = 0
        """Sequence of the push whose memory is in use; 0: nobody's is."""
        link.aside = self._take_aside

    def attempt(self, options: PushOptions, patience: Patience) -> PendingPush:
        """One push up to where this rank's weights were read, or it ended before that."""
        self._sequence += 1
        self._unsettled = self._sequence
        feed = Feed(self._rank, self._link, self.held, self._sequence, patience)
        pending = PendingPush(
            self._link,
            sequence=self._sequence,
            step=options.step,
            seconds=patience.total,
            settle=self._ended,
            detached=options.detached,
        )
        begin = options.message(self._sequence, max(patience.left - ANSWER_GRACE_SECONDS, 0.0), self.held)
        self._link.send(rank_pb2.RankRequest(push_begin=begin), patience)
        try:
            plan = feed.answer("push_plan", "every rank to push, and the coordinator's plan").push_plan
            self._carry_out(feed, plan, patience)
            pending.read(plan.version, feed.unread)
        except PushEnded as ended:
            pending.end(ended.result)
        except BaseException:
            self._settle(pending.sequence, released=False, failed=True)
            raise
        self._asked[self._sequence] = self._last = pending
        return pending

    def result(self, pending: PendingPush, patience: Patience) -> rank_pb2.PushResult:
        """Wait for it. Whoever stops waiting gives its memory up: nobody will say when it is free."""
        try:
            return pending.decided(patience)
        except BaseException:
            self._settle(pending.sequence, released=False, failed=True)
            raise

    def settle_last(self, patience: Patience) -> None:
        """Wait until the push before, if somebody left it under way, is decided. Raises as `result` does."""
        last, self._last = self._last, None
        if last is None:
            return
        result = self.result(last, patience)
        if result.error_reason and not last.told:
            log.warning("push_failed_unheard", step=last.step, reason=result.error_reason, cause=result.error_message)

    def _ended(self, sequence: int, result: rank_pb2.PushResult) -> None:
        self._settle(sequence, released=result.memory_released, failed=bool(result.error_reason))

    def _take_aside(self, message: rank_pb2.RankResponse) -> bool:
        """What the agent says of a push whose weights were read is kept for whoever holds it."""
        kind = message.WhichOneof("message")
        if kind not in ("push_result", "push_serving", "chunk_released"):
            return False
        pending = self._asked.get(getattr(message, kind).sequence)
        return pending is not None and pending.take(message)

    def _carry_out(self, feed: Feed, plan: rank_pb2.PushPlan, patience: Patience) -> None:
        """Export; whatever happens, the ranks that can do so end their iteration, so that none is left waiting."""
        tensors = iter(self._source)
        try:
            with bound_contextvars(**_log_fields(plan)):
                self._feed(feed, plan, tensors)
        except PushEnded as ended:
            if _whole(ended.result):
                drain(tensors)
            raise
        except Exception as error:
            self._give_up(error, patience)
            result = feed.end()
            if isinstance(error, WeightplaneError) and (result is None or _whole(result)):
                drain(tensors)
            # Of a link the agent knows both ends, and whether the fleet committed without it.
            if result is not None and (result.retry or isinstance(error, LinkFailed) or self._by_another(result)):
                raise PushEnded(result) from error
            raise

    def _feed(self, feed: Feed, plan: rank_pb2.PushPlan, tensors: Tensors) -> None:
        times, failure = Times(plan), None
        try:
            feed.run(plan, self._layout, tensors, times)
            log.info("weights_exported", rank=self._rank, version=plan.version.number, bytes=times.byte_count)
        except Exception as error:
            failure = error
            raise
        finally:
            if times.on:
                with suppress(WeightplaneError):
                    told = rank_pb2.RankRequest(push_times=times.told(failure))
                    self._link.send(told, Patience(TOLD_SECONDS))

    def _by_another(self, result: rank_pb2.PushResult) -> bool:
        """What this rank met, such as a broken collective, came of another one's end."""
        lost = result.error_reason == PeerLost.reason
        return lost and result.error_metadata["peer"] != f"rank {self._rank}"

    def _give_up(self, error: Exception, patience: Patience) -> None:
        failed = rank_pb2.PushFailed(cause=f"{type(error).__name__}: {error}"[:MAX_CAUSE_LENGTH])
        if isinstance(error, WeightplaneError):
            failed.error_reason = error.reason
            failed.error_metadata.update(error.metadata())
        with suppress(WeightplaneError):
            self._link.send(rank_pb2.RankRequest(push_failed=failed), patience)

    def _settle(self, sequence: int, *, released: bool, failed: bool) -> None:
        """Once for each push: a late answer to one that was given up says nothing of the next one's memory (INV-12)."""
        if self._unsettled == sequence:
            self._unsettled = 0
            self.held.settle(released=released, failed=failed)


def _log_fields(plan: rank_pb2.PushPlan) -> dict[str, str]:
    """As every process of the fleet names an update in its log."""
    return {"update_id": plan.update_id} | ({"trace_id": plan.traced} if plan.traced else {})


def _whole(result: rank_pb2.PushResult) -> bool:
    """Whether every rank is still there to take part in an iteration."""
    return result.retry or result.error_reason != PeerLost.reason
