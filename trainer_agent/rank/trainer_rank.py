"""TrainerRank: what a training process holds to push its weights to the rollout engines.

    with TrainerRank.join("coordinator:7070", source=source) as rank:
        report = rank.push(step)

Promises: no gRPC in this process, so data loaders and checkpoints may fork at any time; the same result or the
same typed error on every rank; memory is written again only after nobody reads it (INV-12). A fenced rank
raises StaleTerm from then on, never retries, and leaves the `with` block with the exit code FENCED.

Refuses use from several threads at once, and from a forked child.
"""

from __future__ import annotations

import atexit
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

import structlog

from controlplane.core.errors import LinkFailed, PeerLost, StaleTerm, WeightplaneError, WrongRun
from controlplane.core.layout import Layout
from controlplane.devices import host_id
from controlplane.exit_codes import ExitCode
from controlplane.processes import set_death_signal
from controlplane.rpc.codec import layout_to_parts
from trainer_agent import wire
from trainer_agent.rank.devices import current_device
from trainer_agent.rank.exporter import layout_of
from trainer_agent.rank.feed import Feed, Held, drain
from trainer_agent.rank.gather import GatherGroups
from trainer_agent.rank.inbox import PushEnded
from trainer_agent.rank.link import Patience, RankLink
from trainer_agent.rank.report import PushReport, report_of
from trainer_agent.rank.spawn import RankPlace, Sidecar, find_agent
from trainer_agent.segments import SegmentPool
from trainer_agent.source import WeightSource
from weightplane.local.v1 import rank_pb2
from weightplane.v1 import weight_update_pb2

log = structlog.get_logger(__name__)

JOIN_SECONDS = 300.0
PUSH_SECONDS = 600.0
ANSWER_GRACE_SECONDS = 15.0
"""What a rank waits beyond its own limit: the agent ends the wait first, and says why."""
SEND_SECONDS = 5.0
"""Longest that a few bytes to the agent may take; it reads always."""
MAX_CAUSE_LENGTH = 4096
"""Of an exception's text on its way to the other ranks."""


class TrainerRank:
    """One rank's session with the control plane. Make it with `join`."""

    def __init__(
        self, link: RankLink, place: RankPlace, layout: Layout, source: WeightSource, groups: GatherGroups
    ) -> None:
        self._link = link
        self._place = place
        self._layout = layout
        self._source = source
        self._held = Held(SegmentPool("", place.rank), groups)
        self._push_seconds = PUSH_SECONDS
        self._sidecar: Sidecar | None = None
        self._sequence = 0
        self._step = 0
        self._phase = ""
        self._closed = False
        self._owner = os.getpid()
        self.term = 0
        """Term of the trainer's lease when this rank joined."""
        self.run_id = ""
        """The run that it belongs to."""

    @classmethod
    def join(
        cls,
        coordinator: str | None = None,
        *,
        source: WeightSource,
        model: str = "policy",
        run_id: str | None = None,
        join_timeout: float = JOIN_SECONDS,
        push_timeout: float = PUSH_SECONDS,
    ) -> TrainerRank:
        """Join the trainer's other ranks and hold the model's lease. Collective; timeouts in seconds.

        Raises:
            LayoutInvalid: the source's metadata is wrong, or differs between ranks.
            LeaseHeld: another trainer holds the lease, and did so until the end.
            DeadlineExceeded, WrongRun, IncompatibleNode, InvalidRequest, PeerLost.
        """
        patience = Patience(join_timeout + ANSWER_GRACE_SECONDS)
        place = RankPlace.detect()
        run_id = run_id or os.environ.get(wire.RUN_ID_VARIABLE)
        layout = layout_of(source)
        if wire.RANK_SOCKET_VARIABLE in os.environ:
            set_death_signal(signal.SIGKILL)
        socket, sidecar = find_agent(coordinator, run_id, place)
        link = _connect(socket, sidecar, patience)
        rank = cls(link, place, layout, source, GatherGroups(place.rank, socket.parent))
        rank._sidecar, rank._push_seconds = sidecar, push_timeout
        atexit.register(rank.close)
        try:
            rank._join(model, run_id, join_timeout, patience)
        except BaseException:
            rank.close()
            raise
        rank._held.segments = SegmentPool(rank.run_id, place.rank)
        return rank

    def push(self, step: int) -> PushReport:
        """Carry the source's weights to the fleet as a new version. Collective; returns when the fleet decided.

        An update that failed for a passing reason is repeated, whole and under a new number, until `push_timeout`.

        Raises:
            UpdateFailed: the fleet did not commit; what it served is served on.
            StaleTerm: a later trainer was given the lease. PeerLost: another rank is gone. LayoutInvalid: the
            source yields something else than it stated. NoEngines, LimitExceeded, SlotMismatch, DeadlineExceeded.
        """
        started = time.monotonic()
        patience = Patience(self._push_seconds + ANSWER_GRACE_SECONDS)
        before, self._step, self._phase = self._phase, step, "push"
        try:
            while True:
                result = self._attempt(step, patience)
                if not result.retry:
                    return report_of(result, step, time.monotonic() - started)
                log.warning("push_repeated", step=step, reason=result.error_reason, cause=result.error_message)
        finally:
            with suppress(WeightplaneError):
                self._progress(step, before)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What this rank does now, such as "train": people see it, and the lease is renewed by it."""
        before = self._phase
        self._progress(self._step, name)
        try:
            yield
        finally:
            self._progress(self._step, before)

    def set_step(self, step: int) -> None:
        """The step that this rank works on now."""
        self._progress(step, self._phase)

    def close(self) -> None:
        """Leave, and let go of segments, groups and connections. Idempotent."""
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        atexit.unregister(self.close)
        with suppress(WeightplaneError):
            self._link.send(rank_pb2.RankRequest(leave=rank_pb2.Leave()), Patience(SEND_SECONDS))
        self._held.close()
        self._link.close()
        if self._sidecar is not None:
            self._sidecar.stop()

    def _join(self, model: str, run_id: str | None, timeout: float, patience: Patience) -> None:
        join = rank_pb2.Join(
            rank=self._place.rank,
            world_size=self._place.world_size,
            model=model,
            pid=os.getpid(),
            host_id=host_id(),
            device_uuid=current_device(),
            restart_count=self._place.restart_count,
            layout_digest=self._layout.digest,
            timeout_seconds=timeout,
        )
        self._link.send(rank_pb2.RankRequest(join=join), patience)
        if self._place.rank == 0:
            for part in layout_to_parts(self._layout):
                self._link.send(rank_pb2.RankRequest(layout_part=_local_part(part)), patience)
        message = self._link.receive(patience, "join", "all ranks and the lease")
        self.term, self.run_id = message.joined.term, message.joined.run_id
        if run_id and run_id != self.run_id:
            raise WrongRun(expected=self.run_id, got=run_id)
        log.info("rank_joined", rank=self._place.rank, term=self.term, run=self.run_id)

    def _attempt(self, step: int, patience: Patience) -> rank_pb2.PushResult:
        self._sequence += 1
        feed = Feed(self._place.rank, self._link, self._held, self._sequence, patience)
        limit = max(patience.left - ANSWER_GRACE_SECONDS, 0.0)
        begin = rank_pb2.PushBegin(step=step, timeout_seconds=limit, sequence=self._sequence)
        self._link.send(rank_pb2.RankRequest(push_begin=begin), patience)
        try:
            plan = feed.answer("push_plan", "every rank to push, and the coordinator's plan").push_plan
            self._carry_out(feed, plan, patience)
            result = feed.answer("push_result", "the fleet's decision").push_result
        except PushEnded as ended:
            result = ended.result
        except BaseException:
            self._held.settle(released=False, failed=True)
            raise
        self._held.settle(released=result.memory_released, failed=bool(result.error_reason))
        return result

    def _carry_out(self, feed: Feed, plan: rank_pb2.PushPlan, patience: Patience) -> None:
        """Export; whatever happens, the ranks that can do so end their iteration, so that none is left waiting."""
        tensors = iter(self._source)
        try:
            feed.run(plan, self._layout, tensors)
        except PushEnded as ended:
            if _whole(ended.result):
                drain(tensors)
            raise
        except Exception as error:
            self._give_up(error, patience)
            result = feed.end()
            if isinstance(error, WeightplaneError) and (result is None or _whole(result)):
                drain(tensors)
            if result is not None and (result.retry or isinstance(error, LinkFailed)):
                # Of a link the agent knows both ends, and whether the fleet committed without it.
                raise PushEnded(result) from error
            raise

    def _give_up(self, error: Exception, patience: Patience) -> None:
        failed = rank_pb2.PushFailed(cause=f"{type(error).__name__}: {error}"[:MAX_CAUSE_LENGTH])
        if isinstance(error, WeightplaneError):
            failed.error_reason = error.reason
            failed.error_metadata.update(error.metadata())
        with suppress(WeightplaneError):
            self._link.send(rank_pb2.RankRequest(push_failed=failed), patience)

    def _progress(self, step: int, phase: str) -> None:
        self._step, self._phase = step, phase
        message = rank_pb2.Progress(step=step, phase=phase)
        self._link.send(rank_pb2.RankRequest(progress=message), Patience(SEND_SECONDS))

    def __enter__(self) -> TrainerRank:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if isinstance(error, StaleTerm):
            log.error("trainer_fenced", cause=str(error))
            raise SystemExit(int(ExitCode.FENCED)) from error


def _connect(socket: Path, sidecar: Sidecar | None, patience: Patience) -> RankLink:
    try:
        return RankLink(socket, patience, sidecar.check if sidecar else None)
    except WeightplaneError:
        if sidecar:
            sidecar.stop()
        raise


def _whole(result: rank_pb2.PushResult) -> bool:
    """Whether every rank is still there to take part in an iteration."""
    return result.retry or result.error_reason != PeerLost.reason


def _local_part(part: weight_update_pb2.LayoutPart) -> rank_pb2.LayoutPartMessage:
    return rank_pb2.LayoutPartMessage(
        index=part.index, count=part.count, tensors=part.tensors, ties=part.ties, format=part.format
    )
