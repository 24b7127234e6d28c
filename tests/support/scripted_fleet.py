"""A fleet by script: the coordinator's real core, told in virtual time what its agents say; and the views of it.

For what people see: states that real processes come to by accident, at times that are always the same.
"""

from __future__ import annotations

from dataclasses import replace

from controlplane.coordinator import views
from controlplane.coordinator.happenings import Happenings
from controlplane.coordinator.token_lags import TokenLags
from controlplane.core import fleet_effects as fx
from controlplane.core import fleet_events as events
from controlplane.core.engine_state import (
    EngineState,
    Held,
    Hold,
    HoldKind,
    Life,
    Poisoned,
    Progress,
    Stage,
    Timings,
    Unset,
)
from controlplane.core.fleet import FleetCore, FleetSettings
from controlplane.core.plan import EnginePlace, RankPlace, Transport
from controlplane.core.update_transaction import UpdateTransaction
from controlplane.core.versions import (
    DeviceUuid,
    EngineId,
    Incarnation,
    ModelName,
    Rank,
    RunId,
    Term,
    TrainerId,
    UpdateId,
)
from controlplane.ledger import MemoryLedger
from weightplane.v1 import operator_pb2

RUN, POLICY = RunId("grpo-7b"), ModelName("policy")
STARTED_AT = 1_767_621_720.0
"""The clock when the script began: 2026-01-05 14:02:00 UTC."""
BYTES = 15 * 2**30
TTL_SECONDS = 10.0
HEARTBEAT_SECONDS = 1.0
NOW = frozenset({Transport.SHARED_MEMORY, Transport.INLINE, Transport.BROADCAST})
MOVES = {Stage.RECEIVING: 0.4, Stage.READY: 1.6, Stage.INSTALLING: 0.25, Stage.APPLIED: 0.9}
"""Seconds that a stage lasts from the one before, about."""


class ScriptedFleet:
    """Engines, ranks 0 to 3 of a trainer, and a clock that only `wait` moves."""

    def __init__(self, engines: int, *, ledger: MemoryLedger | None = None, trainer: bool = True) -> None:
        self.now = 0.0
        self.ledger = ledger or MemoryLedger()
        settings = FleetSettings(RUN, lease_ttl_seconds=TTL_SECONDS)
        self.core = FleetCore(settings, self.ledger.open(RUN), self.now)
        self.states: dict[str, EngineState] = {}
        self.sessions: dict[str, int] = {}
        self.silent: set[str] = set()
        self._messages, self._happenings, self._lags = views.Messages(), Happenings(), TokenLags()
        self._updates, self._beat_at, self._works_on = 0, 0.0, (0, "train")
        self.view()
        for i in range(engines):
            self.join(f"engine-{i}", i)
        if trainer:
            self.train()
        self.view()

    def handle(self, event: events.Event) -> list[fx.Effect]:
        effects = self.core.handle(event, self.now)
        for effect in effects:
            if isinstance(effect, fx.Save):
                self.ledger.save(effect.record)
        return effects

    def view(self) -> operator_pb2.FleetView:
        """As the coordinator would publish it now."""
        made = views.fleet_view(self.core, self.now, STARTED_AT, self._messages)
        self._happenings.see(made)
        self._lags.see(made)
        return made

    def wait(self, seconds: float) -> None:
        """Everybody's heartbeat goes on, but for those that are silent."""
        self.now += seconds
        if self.now - self._beat_at < HEARTBEAT_SECONDS:
            return
        self._beat_at = self.now
        for name in self.sessions.keys() - self.silent - {"trainer"}:
            self.report(name)
        if "trainer" in self.sessions:
            self.step(*self._works_on)
        self.handle(events.Tick())

    # ---- agents ----

    def join(self, name: str, number: int) -> None:
        """Every fourth engine shares the devices of two ranks; the others are on hosts of their own."""
        colocated = number % 4 == 0 and number < 8
        devices = (f"GPU-{number // 2}", f"GPU-{number // 2 + 1}") if colocated else (f"GPU-e{number}",)
        host = "trainer-host" if colocated else f"host-{number // 8}"
        state = EngineState(RUN, POLICY, EngineId(name), Incarnation(f"life-{number}"), Life.RUNNING)
        place = EnginePlace(
            EngineId(name),
            state.incarnation,
            f"10.0.{number // 200}.{number % 200 + 10}:7071",
            host,
            tuple(map(DeviceUuid, devices)),
            transports=NOW,
        )
        self.states[name], self.sessions[name] = state, 100 + len(self.sessions)
        self.handle(events.EngineConnected(self.sessions[name], place, state, False, ("checkpoint",), Term(0), Term(0)))

    def train(self) -> None:
        ranks = tuple(RankPlace(Rank(i), "trainer-host", DeviceUuid(f"GPU-{i}")) for i in range(4))
        self.sessions["trainer"] = 99
        self.handle(
            events.TrainerConnected(
                99, RUN, POLICY, TrainerId("trainer"), Incarnation("t"), ranks, Term(0), "", False, transports=NOW
            )
        )

    def report(self, name: str, **changes: object) -> None:
        """Its next full state; the gate as an agent computes it."""
        state = self.states[name] = replace(self.states[name], **changes)  # type: ignore[arg-type]
        gate = state.gate_open(frozenset(self.core.served_to(self.sessions[name], POLICY)))
        self.handle(events.EngineReported(self.sessions[name], state, gate))

    def step(self, number: int, phase: str) -> None:
        self._works_on = (number, phase)
        progress = int(self.now * 1000)
        self.handle(events.TrainerReported(99, self.core.model(POLICY).term, number, phase, progress, False))

    def lose(self, name: str) -> None:
        self.silent.add(name)
        self.handle(events.SessionEnded(self.sessions[name], goodbye=False))

    def leave(self, name: str) -> None:
        self.handle(events.SessionEnded(self.sessions.pop(name), goodbye=True))

    # ---- updates ----

    def begin(self, step: int) -> UpdateTransaction:
        self._updates += 1
        self.step(step, "push")
        request = events.UpdateRequested(
            UpdateId(f"{self._updates * 0x9E3779B1 % 2**32:08x}{self._updates:024x}"),
            f"request-{self._updates}",
            RUN,
            POLICY,
            self.core.model(POLICY).term,
            step,
            None,
            byte_count=BYTES,
        )
        return next(x.update for x in self.handle(request) if isinstance(x, fx.UpdatePlanned))

    def stage(self, name: str, update: UpdateTransaction, stage: Stage, *, received: int = BYTES) -> None:
        updating = frozenset({Hold(HoldKind.UPDATING, update.update_id)})
        timings = Timings(0.021, 0.41, 0.006, 0.18) if stage is Stage.APPLIED else None
        progress = Progress(update.update_id, update.version, stage, received, timings=timings)
        changes: dict[str, object] = {"progress": progress, "holds": frozenset()}
        if stage is Stage.INSTALLING:
            changes |= {"weights": Unset(), "holds": updating}
        elif stage is Stage.APPLIED:
            changes["weights"] = Held(update.version, f"content of {update.version.number}".encode())
        elif stage is Stage.FAILED:
            why = "the canary's log probabilities are not finite"
            progress = replace(progress, error_reason="CANARY_FAILED", error_message=why)
            changes |= {"weights": Poisoned(why), "holds": frozenset({Hold(HoldKind.POISONED, "")})}
            changes["progress"] = progress
        self.report(name, **changes)

    def push(self, step: int, *, fails: frozenset[str] = frozenset(), until: Stage = Stage.APPLIED) -> None:
        """An update, each engine at its own pace; nobody goes before all are ready. Stops in the middle of `until`."""
        update = self.begin(step)
        began = self.now
        names = [a.engine.engine_id for a in update.plan.assignments if a.engine.engine_id not in self.silent]
        at = began
        for stage, seconds in MOVES.items():
            moves = sorted((at + seconds * _pace(name, stage), name) for name in names)
            for i, (when, name) in enumerate(moves):
                if stage is until and until is not Stage.APPLIED and i >= len(moves) * 2 // 3:
                    return
                self.wait(max(0.0, when - self.now))
                failed = stage is Stage.APPLIED and name in fails
                self.stage(name, update, Stage.FAILED if failed else stage)
            at = self.now

    def train_on(self, steps: int, first: int = 1) -> None:
        """Whole steps: rollouts, training, a push."""
        for step in range(first, first + steps):
            self.step(step, "rollout")
            self.make_tokens()
            self.wait(9.0)
            self.step(step, "train")
            self.wait(7.0)
            self.push(step)
            self.view()

    def make_tokens(self) -> None:
        """Some of what each engine makes is a commit behind, since requests outlive an update."""
        for i, (name, state) in enumerate(self.states.items()):
            if name in self.silent or not isinstance(state.weights, Held):
                continue
            before = state.tokens_by_lag or (0,) * 9
            made = (40_000 + 900 * (i % 7), 5_200 + 130 * (i % 5), 310, 12, 0, 0, 0, 0, 0)
            total = tuple(a + b for a, b in zip(before, made, strict=True))
            live, waiting = 24 + i % 9, i % 3 if i % 5 == 0 else 0
            self.report(name, tokens_by_lag=total, live_requests=live, waiting_requests=waiting)


def _pace(name: str, stage: Stage) -> float:
    """Between 0.7 and 1.6, the same in each run."""
    return 0.7 + (sum(map(ord, name + stage.value)) * 7919 % 900) / 1000


def healthy() -> operator_pb2.FleetView:
    fleet = ScriptedFleet(6)
    fleet.push(0)
    fleet.train_on(9)
    fleet.step(10, "rollout")
    fleet.make_tokens()
    fleet.wait(1.0)
    return fleet.view()


def updating() -> operator_pb2.FleetView:
    fleet = ScriptedFleet(6)
    fleet.push(0)
    fleet.train_on(4)
    fleet.push(5, until=Stage.INSTALLING)
    fleet.stage("engine-3", fleet.core.open_update(POLICY) or fleet.begin(0), Stage.INSTALLING)
    fleet.wait(0.2)
    return fleet.view()


def poisoned() -> operator_pb2.FleetView:
    fleet = ScriptedFleet(6)
    fleet.push(0)
    fleet.train_on(5)
    fleet.push(6, fails=frozenset({"engine-2"}))
    fleet.view()
    fleet.report("engine-4", holds=frozenset({Hold(HoldKind.OPERATOR, "ann")}))
    fleet.wait(2.0)
    fleet.lose("engine-5")
    fleet.wait(14.0)
    return fleet.view()


def recovering() -> operator_pb2.FleetView:
    """A restart: two of four engines have reported, the trainer has not."""
    before = ScriptedFleet(4)
    before.push(0)
    before.train_on(3)
    fleet = ScriptedFleet(0, ledger=before.ledger, trainer=False)
    for i in range(2):
        name = f"engine-{i}"
        fleet.join(name, i)
        fleet.report(name, weights=before.states[name].weights, live_requests=17)
    fleet.wait(3.0)
    return fleet.view()


def two_hundred() -> operator_pb2.FleetView:
    fleet = ScriptedFleet(200)
    fleet.push(0)
    fleet.train_on(2)
    fleet.push(3, fails=frozenset({"engine-77"}))
    fleet.make_tokens()
    for name in ("engine-31", "engine-32", "engine-150"):
        fleet.lose(name)
    fleet.report("engine-120", holds=frozenset({Hold(HoldKind.DRAINING, "operator")}))
    fleet.push(4, until=Stage.READY)
    return fleet.view()
