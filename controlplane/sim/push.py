"""One push of a simulated trainer: begin, feed every engine, watch the update, say who may go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from controlplane.core import errors as e
from controlplane.core import fleet_events as fe
from controlplane.core.pauses import PauseMode, PausePolicy
from controlplane.core.update_transaction import Phase
from controlplane.core.versions import EngineId
from controlplane.sim.coordinator import Begun, Watch
from controlplane.sim.feed import COMMITS, Feed
from controlplane.sim.kernel import Stream, connect
from controlplane.sim.settings import digest_of

if TYPE_CHECKING:
    from controlplane.sim.trainer import Trainer
    from controlplane.sim.world import World

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
NOBODY: frozenset[EngineId] = frozenset()


class Push:
    """One attempt, under one number."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.world: World = trainer.world
        self.layout = trainer.team.spec.layout
        self.content = self.world.next_content()
        self.begun: Begun | None = None
        self.phase = Phase.PREPARING
        self.over = False
        self.feeds: list[Feed] = []
        self.pause = self.world.kernel.rng.choice(PAUSES)
        """What becomes of the requests in the engines."""
        self._request_id = f"{trainer.incarnation}:{trainer.step}:{self.content}"
        self._avoid = tuple(trainer.broken.values())
        """Of this request, also when it is repeated."""

    def after(self, delay: float, action: Callable[[], None]) -> None:
        self.trainer.after(delay, lambda: None if self.over else action())

    def retry(self, action: Callable[[], None]) -> None:
        self.after(self.world.kernel.rng.uniform(*RETRY_SECONDS), action)

    # ---- begin ----

    def begin(self) -> None:
        stream = connect(self.trainer, self.world.coordinator)
        if stream is None:
            self.retry(self.begin)
            return
        coordinator, update_id = self.world.coordinator, self.world.coordinator.new_update_id()
        request = fe.UpdateRequested(
            update_id,
            self._request_id,
            self.world.settings.run_id,
            self.trainer.model,
            self.trainer.term,
            self.trainer.step,
            self.world.settings.push_limit,
            self.layout.digest,
            self.layout.byte_count,
            self._avoid,
        )
        stream.on_client_end = self._begin_failed
        stream.to_server(lambda: coordinator.begin(stream, request, lambda begun: self._begun(stream, begun)))

    def _begin_failed(self, error: e.WeightplaneError) -> None:
        if self.over or self.begun is not None:
            return
        if isinstance(error, e.StaleTerm):
            self.trainer.fence()
        if isinstance(error, e.RequestRepeated):  # its answer was lost, and meanwhile it was decided
            self.over = True
            self.trainer.push_over(self, committed=False)
        elif isinstance(error, (e.NoEngines, e.NotEnoughEngines)):  # a late word may have put them to sleep again
            self.retry(lambda: self.trainer.devices.give(self.begin))
        else:
            self.retry(self.begin)

    def _begun(self, stream: Stream, begun: Begun) -> None:
        stream.cancel()
        if self.over or self.begun is not None:
            return
        self.world.faults.point(self.trainer, "trainer.after_begin")
        self.begun = begun
        self.world.witness.wrote(self.trainer.model, begun.version, digest_of(self.content))
        self._watch()
        for assignment in begun.plan.assignments:
            feed = Feed(self, assignment)
            self.feeds.append(feed)
            feed.open()
        self.after(self.world.settings.push_limit, self._late)

    # ---- the decision ----

    def _watch(self) -> None:
        if self.phase.final or self.begun is None:
            return
        stream = connect(self.trainer, self.world.coordinator)
        if stream is None:
            self.retry(self._watch)
            return
        watch, update_id = Watch(stream, self._told), self.begun.update_id
        coordinator = self.world.coordinator
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
            if phase in COMMITS and feed.engine_id not in lost:
                feed.commit()
            elif phase.final:
                feed.abort(f"the update is {phase.value}")
        if phase.final:
            patient = any(f.streams and f.engine_id in awaited for f in self.feeds)
            limit = AWAITED_SECONDS if patient else STRAGGLER_SECONDS
            self._wait_for_stragglers(self.world.kernel.now + limit if phase in COMMITS else 0.0)

    def _wait_for_stragglers(self, until: float) -> None:
        if any(f.working for f in self.feeds) and self.world.kernel.now < until:
            self.after(LOOK_SECONDS, lambda: self._wait_for_stragglers(until))
        else:
            self._end()

    def refused(self) -> None:
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
        assert self.begun is not None
        stream = connect(self.trainer, self.world.coordinator)
        if stream is None:
            self.retry(lambda: self.give_up(reason))
            return
        coordinator, update_id = self.world.coordinator, self.begun.update_id
        request = fe.AbortRequested(self.world.settings.run_id, update_id, self.trainer.term, reason)
        stream.to_server(lambda: coordinator.abort(stream, request, self._told))

    def _end(self) -> None:
        for feed in self.feeds:
            feed.abort("the push is over")
        self.over = True
        self.trainer.push_over(self, committed=self.phase in (Phase.COMMITTED, Phase.DEGRADED))
