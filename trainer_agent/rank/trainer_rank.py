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

import structlog

from controlplane.core.canary import CanaryReference
from controlplane.core.errors import InvalidRequest, StaleTerm, WeightplaneError, WrongRun
from controlplane.core.layout import Layout
from controlplane.core.pauses import PausePolicy
from controlplane.devices import host_id
from controlplane.exit_codes import ExitCode
from controlplane.processes import set_death_signal
from controlplane.rpc.codec import layout_to_parts
from trainer_agent import wire
from trainer_agent.rank import cuda_ipc
from trainer_agent.rank.devices import current_device
from trainer_agent.rank.exporter import layout_of
from trainer_agent.rank.feed import Held
from trainer_agent.rank.gather import GatherGroups
from trainer_agent.rank.kept import KeptVersions
from trainer_agent.rank.link import Patience, RankLink
from trainer_agent.rank.pending import PendingPush
from trainer_agent.rank.pushes import ANSWER_GRACE_SECONDS, Pushes, PushOptions
from trainer_agent.rank.report import PushReport, failure_of
from trainer_agent.rank.shared_devices import SharedDevices
from trainer_agent.rank.spawn import RankPlace, Sidecar, find_agent
from trainer_agent.segments import SegmentPool
from trainer_agent.source import WeightSource
from weightplane.local.v1 import rank_pb2
from weightplane.v1 import weight_update_pb2

log = structlog.get_logger(__name__)

JOIN_SECONDS = 300.0
PUSH_SECONDS = 600.0
SEND_SECONDS = 5.0
"""Longest that a few bytes to the agent may take; it reads always."""
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
        self._pushes = Pushes(link, place.rank, layout, source, Held(SegmentPool("", place.rank), groups))
        self._devices = SharedDevices(link)
        self._push_seconds = PUSH_SECONDS
        self._sidecar: Sidecar | None = None
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
        rank._join(model, run_id, join_timeout, patience)
        rank._pushes.held.segments = (KeptVersions if deltas else SegmentPool)(rank.run_id, place.rank)
        return rank

    def push(
        self,
        step: int,
        *,
        wait: WaitFor = "applied",
        check: bool = False,
        reference: CanaryReference | None = None,
        pause: PausePolicy | None = None,
    ) -> PushReport:
        """Carry the source's weights to the fleet as a new version. Collective; returns when the fleet decided.

        An update that failed for a passing reason is repeated, whole and under a new number, until `push_timeout`.

        Args:
            step: The trainer's step whose weights these are; equal on all ranks, as `wait` is.
            wait: `applied`: until the fleet decided. `serving`: until an engine takes requests under the version.
                `released`: until this rank's memory is free, which may be before the decision: then the report's status
                is UNDECIDED, and nothing is repeated.
            check: Wait for `serving`, and then have every engine that applied the version asked what it holds.
            reference: What this trainer's own model says of a prompt under these weights: an engine that says something
                else after its install is poisoned (CANARY_FAILED), and serves nothing. On one rank, or equal on all.
            pause: What becomes of the engines' requests at their installs; None: by each engine's own setting.

        Raises:
            UpdateFailed: the fleet did not commit, and what it served is served on. CheckFailed: it did, and the check
            found an engine that holds something else. StaleTerm: a later trainer was given the lease. PeerLost: another
            rank is gone. LayoutInvalid: the source yields something else than it stated. NoEngines, LimitExceeded,
            SlotMismatch, DeadlineExceeded, InvalidRequest.
        """
        if wait not in get_args(WaitFor):
            raise InvalidRequest(field="wait", problem=f"one of {', '.join(get_args(WaitFor))}, not {wait!r}")
        options = PushOptions(step, check=check, serving=wait == "serving", reference=reference, pause=pause)
        options.require_valid()
        if wait == "released" and not check:
            pending = self.push_async(step, reference=reference, pause=pause)
            pending.released()
            return pending.so_far()
        return self._push(options)

    def push_async(
        self, step: int, *, reference: CanaryReference | None = None, pause: PausePolicy | None = None
    ) -> PendingPush:
        """As `push`, but go on training meanwhile. Collective; returns when this rank's weights were read.

        They may change from then on. It is one push at a time: the next one first waits until this one is decided.
        What becomes of the update is told by what is returned, on every rank alike, and nothing is repeated: the next
        push, which is whole, heals what this one left undone. What is raised here is this rank's own.

        Raises:
            LayoutInvalid: the source yields something else than it stated. StaleTerm, PeerLost: the session is over.
            DeadlineExceeded: the other ranks did not come, or the push before was not decided in time.
        """
        options = PushOptions(step, detached=True, reference=reference, pause=pause)
        options.require_valid()
        patience = self._patience()
        with self._pushing(step, patience):
            return self._pushes.attempt(options, patience)

    def take_devices(self, level: int = 1) -> None:
        """Put the engines on this trainer's devices to sleep. Collective; returns when the devices are free.

        `level` 1 keeps their weights aside in host memory, 2 drops them. From here until `give_devices` nobody else
        wakes, heals or restarts them. `push` (with `wait="applied"`) brings back their weights' memory and installs;
        their KV cache, their canary and their gate wait for `give_devices`. Idempotent.

        Raises:
            UnsupportedByEngine, ModelFrozen: an engine cannot sleep so. DeadlineExceeded, SlotMismatch, StaleTerm,
            PeerLost, InvalidRequest. Some engines may sleep after an error: `give_devices` wakes them.
        """
        patience = self._patience()
        self._pushes.settle_last(patience)
        self._devices.take(level, patience)

    def give_devices(self) -> dict[str, str]:
        """Wake what sleeps for this trainer: KV cache, then canary, then gate. Collective; returns after the canaries.

        Free this trainer's own device memory first. Idempotent. Returns the engines whose canary found fault with what
        was pushed while they slept, each with the cause, the same on every rank: they are awake, poisoned and shut, and
        the next push heals them. Empty: all is well.

        Raises:
            DeadlineExceeded, SlotMismatch, StaleTerm, PeerLost.
        """
        patience = self._patience()
        self._pushes.settle_last(patience)
        return self._devices.give(patience)

    @property
    def holds_devices(self) -> bool:
        """Engines sleep for this trainer: taken in this life, or by one that died with them."""
        return self._devices.held

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
        self._pushes.held.close()
        self._link.close()
        if self._sidecar is not None:
            self._sidecar.stop()

    def _join(self, model: str, run_id: str | None, timeout: float, patience: Patience) -> None:
        atexit.register(self.close)
        try:
            self._say_join(model, timeout, patience)
            message = self._link.receive(patience, "join", "all ranks and the lease")
            self.term, self.run_id = message.joined.term, message.joined.run_id
            self._devices.held = message.joined.holds_devices
            if run_id and run_id != self.run_id:
                raise WrongRun(expected=self.run_id, got=run_id)
        except BaseException:
            self.close()
            raise
        log.info("rank_joined", rank=self._place.rank, term=self.term, run=self.run_id)

    def _say_join(self, model: str, timeout: float, patience: Patience) -> None:
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
            device_memory=not cuda_ipc.devices.why_not(),
        )
        self._link.send(rank_pb2.RankRequest(join=join), patience)
        if self._place.rank == 0:
            for part in layout_to_parts(self._layout):
                self._link.send(rank_pb2.RankRequest(layout_part=_local_part(part)), patience)

    def _push(self, options: PushOptions) -> PushReport:
        """Until the fleet decided, as often as it takes, and served where that was asked for."""
        patience, started = self._patience(), time.monotonic()
        with self._pushing(options.step, patience):
            while True:
                pending = self._pushes.attempt(options, patience)
                result = self._pushes.result(pending, patience)
                if not result.retry:
                    break
                log.warning("push_repeated", step=options.step, reason=result.error_reason, cause=result.error_message)
            if result.error_reason:
                raise failure_of(result)
            report = pending.served(patience) if options.check or options.serving else pending.applied(0)
            return replace(report, seconds=time.monotonic() - started)

    def _patience(self) -> Patience:
        return Patience(self._push_seconds + ANSWER_GRACE_SECONDS)

    @contextmanager
    def _pushing(self, step: int, patience: Patience) -> Iterator[None]:
        """The phase of a push; after the one before was decided."""
        before, self._step, self._phase = self._phase, step, "push"
        try:
            self._pushes.settle_last(patience)
            yield
        finally:
            with suppress(WeightplaneError):
                self._progress(step, before)

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
                self._pushes.settle_last(self._patience())  # who leaves before the decision ends the push
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


def _local_part(part: weight_update_pb2.LayoutPart) -> rank_pb2.LayoutPartMessage:
    return rank_pb2.LayoutPartMessage(
        index=part.index, count=part.count, tensors=part.tensors, ties=part.ties, format=part.format
    )
