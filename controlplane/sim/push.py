"""One push of a simulated trainer: begin, feed every engine, watch the update, say who may go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from controlplane.core import errors as e
from controlplane.core import fleet_events as fe
from controlplane.core.pauses import PauseMode, PausePolicy
from controlplane.core.update_transaction import Phase
from controlplane.core.versions import EngineId
from controlplane.sim.coordinator import Begun, Watch
from controlplane.sim.devices import Devices
from controlplane.sim.feed import COMMITS, Feed
from controlplane.sim.kernel import Stream, connect
from controlplane.sim.leaseholder import Leaseholder
from controlplane.sim.settings import digest_of
from controlplane.sim.shipment import Shipment

RPC_SECONDS = 2.0
RETRY_SECONDS = (0.1, 0.6)
REFUSAL_SECONDS = 0.5
STRAGGLER_SECONDS = 1.5
"""After a decision: how long engines that it did not wait for may take."""
AWAITED_SECONDS = 10.0
"""The same, of one that is awaited and streams: its bytes come after go, so only then is it waited for."""
LOOK_SECONDS = 0.1
PAUSES = (
    None,
    PausePolicy(PauseMode.ABORT),
    PausePolicy(PauseMode.WAIT, wait_seconds=0.6, fallback=PauseMode.KEEP),
    PausePolicy(PauseMode.WAIT, wait_seconds=0.3, fallback=PauseMode.ABORT),
)


class Ended(Protocol):
    """How who began a push hears of its end."""

    def __call__(self, push: Push, *, committed: bool) -> None: ...


NOBODY: frozenset[EngineId] = frozenset()


class Push:
    """One attempt, under one number."""

    def __init__(self, trainer: Leaseholder, devices: Devices, ended: Ended) -> None:
        self.trainer = trainer
        self.shipment: Shipment | None = None
        """Unset until the coordinator gave it a number."""
        self._around = trainer.around
        self._coordinator = trainer.coordinator
        self._devices = devices
        self._ended = ended
        self._layout = trainer.team.spec.layout
        self._content = self._around.next_content()
        self.phase = Phase.PREPARING
        self.over = False
        self.feeds: list[Feed] = []
        self._pause = self._around.kernel.rng.choice(PAUSES)
        self._request_id = f"{trainer.incarnation}:{trainer.step}:{self._content}"
        self._avoid = tuple(trainer.broken.values())
        """Of this request, also when it is repeated."""

    def after(self, delay: float, action: Callable[[], None]) -> None:
        self.trainer.after(delay, lambda: None if self.over else action())

    def retry(self, action: Callable[[], None]) -> None:
        self.after(self._around.kernel.rng.uniform(*RETRY_SECONDS), action)

    # ---- begin ----

    def begin(self) -> None:
        stream = connect(self.trainer, self._coordinator)
        if stream is None:
            self.retry(self.begin)
            return
        coordinator, update_id = self._coordinator, self._coordinator.new_update_id()
        request = fe.UpdateRequested(
            update_id,
            self._request_id,
            self._around.settings.run_id,
            self.trainer.model,
            self.trainer.term,
            self.trainer.step,
            self._around.settings.push_limit,
            self._layout.digest,
            self._layout.byte_count,
            self._avoid,
        )
        stream.on_client_end = self._begin_failed
        stream.to_server(lambda: coordinator.begin(stream, request, lambda begun: self._begun(stream, begun)))

    def _begin_failed(self, error: e.WeightplaneError) -> None:
        if self.over or self.shipment is not None:
            return
        if isinstance(error, e.StaleTerm):
            self.trainer.fence()
        if isinstance(error, e.RequestRepeated):  # its answer was lost, and meanwhile it was decided
            self.over = True
            self._ended(self, committed=False)
        elif isinstance(error, (e.NoEngines, e.NotEnoughEngines)):  # a late word may have put them to sleep again
            self.retry(lambda: self._devices.give(self.begin))
        else:
            self.retry(self.begin)

    def _begun(self, stream: Stream, begun: Begun) -> None:
        stream.cancel()
        if self.over or self.shipment is not None:
            return
        self._around.faults.point(self.trainer, "trainer.after_begin")
        self.shipment = Shipment(begun, self._layout, self._content, self._pause)
        self._around.witness.wrote(self.trainer.model, begun.version, digest_of(self._content))
        self._watch()
        for assignment in begun.plan.assignments:
            feed = Feed(self.trainer, self.shipment, assignment, retry=self.retry, refused=self._refused)
            self.feeds.append(feed)
            feed.open()
        self.after(self._around.settings.push_limit, self._late)

    # ---- the decision ----

    def _watch(self) -> None:
        if self.phase.final or self.shipment is None:
            return
        stream = connect(self.trainer, self._coordinator)
        if stream is None:
            self.retry(self._watch)
            return
        watch, update_id = Watch(stream, self._told), self.shipment.begun.update_id
        coordinator = self._coordinator
        stream.on_client_end = self._watch_failed
        stream.to_server(lambda: coordinator.watch(update_id, watch))

    def _watch_failed(self, error: e.WeightplaneError) -> None:
        if isinstance(error, e.UnknownUpdate):
            self._told(Phase.FAILED)
        elif not self.over:
            self.retry(self._watch)

    def _told(self, phase: Phase, lost: frozenset[EngineId] = NOBODY, awaited: frozenset[EngineId] = NOBODY) -> None:
        if self.over or self.phase.final:
            return
        self.phase = phase
        for feed in self.feeds:
            feed.phase = phase
        for feed in self.feeds:
            if phase in COMMITS and feed.engine_id not in lost:
                feed.commit()
            elif phase.final:
                feed.abort(f"the update is {phase.value}")
        if phase.final:
            patient = any(f.streams and f.engine_id in awaited for f in self.feeds)
            limit = AWAITED_SECONDS if patient else STRAGGLER_SECONDS
            self._wait_for_stragglers(self._around.kernel.now + limit if phase in COMMITS else 0.0)

    def _wait_for_stragglers(self, until: float) -> None:
        if any(f.working for f in self.feeds) and self._around.kernel.now < until:
            self.after(LOOK_SECONDS, lambda: self._wait_for_stragglers(until))
        else:
            self._end()

    def _refused(self) -> None:
        """An engine would not take it: where it is required and no other moves, going on is senseless."""
        self.after(REFUSAL_SECONDS, self._judge_refusals)

    def _judge_refusals(self) -> None:
        still = any(f.working and not f.ready for f in self.feeds)
        if self.phase is Phase.PREPARING and not still and any(f.required and not f.working for f in self.feeds):
            self.give_up("an engine refused it")

    def _late(self) -> None:
        """The ranks' limit came first. After GO the decision is waited for."""
        if self.phase is Phase.PREPARING:
            self.give_up("the push's limit")

    def give_up(self, reason: str) -> None:
        assert self.shipment is not None
        stream = connect(self.trainer, self._coordinator)
        if stream is None:
            self.retry(lambda: self.give_up(reason))
            return
        coordinator, update_id = self._coordinator, self.shipment.begun.update_id
        request = fe.AbortRequested(self._around.settings.run_id, update_id, self.trainer.term, reason)
        stream.to_server(lambda: coordinator.abort(stream, request, self._told))

    def _end(self) -> None:
        for feed in self.feeds:
            feed.abort("the push is over")
        self.over = True
        self._ended(self, committed=self.phase in (Phase.COMMITTED, Phase.DEGRADED))
