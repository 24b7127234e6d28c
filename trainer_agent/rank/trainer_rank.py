"""TrainerRank: what a training process holds to push its weights to the rollout engines.

    with TrainerRank.join("coordinator:7070", source=source) as rank:
        report = rank.push(step)            # returns when the fleet decided
        pending = rank.push_async(step)     # returns when the weights were read: train on

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
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Literal, get_args
from weakref import WeakValueDictionary

import structlog

from controlplane.core.errors import InvalidRequest, LinkFailed, PeerLost, StaleTerm, WeightplaneError, WrongRun
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
from trainer_agent.rank.kept import KeptVersions
from trainer_agent.rank.link import Patience, RankLink
from trainer_agent.rank.pending import PendingPush
from trainer_agent.rank.report import PushReport, failure_of
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
WaitFor = Literal["released", "applied", "serving"]
"""What a push waits for: nobody reads its memory any more, the fleet decided, an engine takes requests under it."""


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
        self._asked: WeakValueDictionary[int, PendingPush] = WeakValueDictionary()
        """Pushes that somebody may still ask, by sequence: what the agent says of them is kept."""
        self._last: PendingPush | None = None
        """The latest push whose weights were read."""
        self._unsettled = 0
        """Sequence of the push whose memory is in use; 0: nobody's is."""
        link.aside = self._take_aside
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
        agent_config: Path | None = None,
        deltas: bool = False,
    ) -> TrainerRank:
        """Join the trainer's other ranks and hold the model's lease. Collective; timeouts in seconds.

        `agent_config` is a file as `weightplane trainer --config` reads it (checkpoints, for one), for ranks that bring
        their own agent: under plain torchrun, Slurm or Ray. Where one was started before them it is refused.

        `deltas`: engines on other hosts whose agents keep what they hold (their setting `deltas`) are sent only what
        changed since the last push, where that is smaller. Costs shared memory of two more copies of the weights at
        most. Equal on all ranks.

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
        socket, sidecar = find_agent(coordinator, run_id, place, agent_config)
        link = _connect(socket, sidecar, patience)
        rank = cls(link, place, layout, source, GatherGroups(place.rank, socket.parent))
        rank._sidecar, rank._push_seconds = sidecar, push_timeout
        atexit.register(rank.close)
        try:
            rank._join(model, run_id, join_timeout, patience)
        except BaseException:
            rank.close()
            raise
        rank._held.segments = (KeptVersions if deltas else SegmentPool)(rank.run_id, place.rank)
        return rank

    def push(self, step: int, *, wait: WaitFor = "applied", check: bool = False) -> PushReport:
        """Carry the source's weights to the fleet as a new version. Collective; returns when the fleet decided.

        An update that failed for a passing reason is repeated, whole and under a new number, until `push_timeout`.

        Args:
            step: The trainer's step whose weights these are; equal on all ranks, as `wait` is.
            wait: `applied`: until the fleet decided. `serving`: until an engine takes requests under the version.
                `released`: until this rank's memory is free; then nothing is repeated.
            check: Wait for `serving`, and then have every engine that applied the version asked what it holds.

        Raises:
            UpdateFailed: the fleet did not commit, and what it served is served on. CheckFailed: it did, and the check
            found an engine that holds something else. StaleTerm: a later trainer was given the lease. PeerLost: another
            rank is gone. LayoutInvalid: the source yields something else than it stated. NoEngines, LimitExceeded,
            SlotMismatch, DeadlineExceeded, InvalidRequest.
        """
        if wait not in get_args(WaitFor):
            raise InvalidRequest(field="wait", problem=f"one of {', '.join(get_args(WaitFor))}, not {wait!r}")
        if wait == "released" and not check:
            pending = self.push_async(step)
            pending.released()
            return pending.applied(0)
        patience, started = self._patience(), time.monotonic()
        with self._pushing(step, patience):
            while True:
                pending = self._attempt(step, patience, check=check)
                result = self._result(pending, patience)
                if not result.retry:
                    break
                log.warning("push_repeated", step=step, reason=result.error_reason, cause=result.error_message)
            if result.error_reason:
                raise failure_of(result)
            report = pending.served(patience) if check or wait == "serving" else pending.applied(0)
            return replace(report, seconds=time.monotonic() - started)

    def push_async(self, step: int) -> PendingPush:
        """As `push`, but go on training meanwhile. Collective; returns when this rank's weights were read.

        They may change from then on. It is one push at a time: the next one first waits until this one is decided.
        What becomes of the update is told by what is returned, on every rank alike, and nothing is repeated: the next
        push, which is whole, heals what this one left undone. What is raised here is this rank's own.

        Raises:
            LayoutInvalid: the source yields something else than it stated. StaleTerm, PeerLost: the session is over.
            DeadlineExceeded: the other ranks did not come, or the push before was not decided in time.
        """
        patience = self._patience()
        with self._pushing(step, patience):
            return self._attempt(step, patience, detached=True)

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
        """Leave, and let go of segments, groups and connections. Ends a push that is under way: the `with` block waits.

        Idempotent.
        """
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

    def _patience(self) -> Patience:
        return Patience(self._push_seconds + ANSWER_GRACE_SECONDS)

    @contextmanager
    def _pushing(self, step: int, patience: Patience) -> Iterator[None]:
        """The phase of a push; after the one before was decided."""
        before, self._step, self._phase = self._phase, step, "push"
        try:
            self._settle_last(patience)
            yield
        finally:
            with suppress(WeightplaneError):
                self._progress(step, before)

    def _settle_last(self, patience: Patience) -> None:
        last, self._last = self._last, None
        if last is None:
            return
        result = self._result(last, patience)
        if result.error_reason and not last.told:
            log.warning("push_failed_unheard", step=last.step, reason=result.error_reason, cause=result.error_message)

    def _attempt(self, step: int, patience: Patience, *, detached: bool = False, check: bool = False) -> PendingPush:
        """One push up to where this rank's weights were read, or it ended before that."""
        self._sequence += 1
        self._unsettled = self._sequence
        feed = Feed(self._place.rank, self._link, self._held, self._sequence, patience)
        pending = PendingPush(
            self._link,
            sequence=self._sequence,
            step=step,
            seconds=patience.total,
            settle=self._ended,
            detached=detached,
        )
        limit = max(patience.left - ANSWER_GRACE_SECONDS, 0.0)
        begin = rank_pb2.PushBegin(
            step=step,
            timeout_seconds=limit,
            sequence=self._sequence,
            detached=detached,
            check=check,
            keeps_whole=self._held.keeps_whole,
            base=self._held.base,
        )
        self._link.send(rank_pb2.RankRequest(push_begin=begin), patience)
        try:
            plan = feed.answer("push_plan", "every rank to push, and the coordinator's plan").push_plan
            self._carry_out(feed, plan, patience)
        except PushEnded as ended:
            pending.end(ended.result)
        except BaseException:
            self._settle(pending.sequence, released=False, failed=True)
            raise
        self._asked[self._sequence] = self._last = pending
        return pending

    def _result(self, pending: PendingPush, patience: Patience) -> rank_pb2.PushResult:
        """Wait for it. Whoever stops waiting gives its memory up: nobody will say when it is free."""
        try:
            return pending.decided(patience)
        except BaseException:
            self._settle(pending.sequence, released=False, failed=True)
            raise

    def _ended(self, sequence: int, result: rank_pb2.PushResult) -> None:
        self._settle(sequence, released=result.memory_released, failed=bool(result.error_reason))

    def _take_aside(self, message: rank_pb2.RankResponse) -> bool:
        """What the agent says of a push whose weights were read is kept for whoever holds it."""
        kind = message.WhichOneof("message")
        if kind not in ("push_result", "push_serving"):
            return False
        pending = self._asked.get(getattr(message, kind).sequence)
        return pending is not None and pending.take(message)

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
            # Of a link the agent knows both ends, and whether the fleet committed without it.
            if result is not None and (result.retry or isinstance(error, LinkFailed) or self._by_another(result)):
                raise PushEnded(result) from error
            raise

    def _by_another(self, result: rank_pb2.PushResult) -> bool:
        """What this rank met, such as a broken collective, came of another one's end."""
        lost = result.error_reason == PeerLost.reason
        return lost and result.error_metadata["peer"] != f"rank {self._place.rank}"

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
            self._held.settle(released=released, failed=failed)

    def _progress(self, step: int, phase: str) -> None:
        self._step, self._phase = step, phase
        message = rank_pb2.Progress(step=step, phase=phase)
        self._link.send(rank_pb2.RankRequest(progress=message), Patience(SEND_SECONDS))

    def __enter__(self) -> TrainerRank:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._settle_last(self._patience())  # who leaves before the decision ends the push
        except WeightplaneError as ended:
            error = ended
            if not isinstance(ended, StaleTerm):
                raise
        finally:
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
