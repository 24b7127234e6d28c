"""A coordinator's core with a ledger in memory, and engines and trainers that say what a test tells them to say."""

from __future__ import annotations

from dataclasses import replace

from controlplane.core import fleet
from controlplane.core import fleet_effects as fx
from controlplane.core import fleet_events as events
from controlplane.core.engine_state import EngineState, Held, Life, Poisoned, Progress, Stage
from controlplane.core.plan import EnginePlace, LinkFate, RankPlace
from controlplane.core.update_policy import UpdatePolicy
from controlplane.core.update_transaction import UpdateTransaction
from controlplane.core.versions import (
    FROZEN,
    DeviceUuid,
    EngineId,
    Incarnation,
    ModelName,
    Rank,
    RunId,
    Term,
    TrainerId,
    UpdateId,
    WeightVersion,
)
from controlplane.ledger import MemoryLedger

RUN = RunId("run")
POLICY = ModelName("policy")
TTL = 10.0


class Fleet:
    """A coordinator's core with a ledger, and agents that say what they are told to say."""

    def __init__(
        self,
        ledger: MemoryLedger | None = None,
        policy: UpdatePolicy | None = None,
        link_fate: LinkFate = LinkFate.SHARED,
    ) -> None:
        self.ledger = ledger or MemoryLedger()
        self.now = 0.0
        self.settings = fleet.FleetSettings(
            RUN,
            lease_ttl_seconds=TTL,
            step_limit_seconds=60.0,
            policy=policy or UpdatePolicy(),
            link_fate=link_fate,
        )
        self.core = fleet.FleetCore(self.settings, self.ledger.open(RUN), self.now)
        self.states: dict[str, EngineState] = {}
        self.sessions = 100
        self.effects: list[fx.Effect] = []
        self.batches: list[list[fx.Effect]] = []

    def handle(self, event: events.Event) -> list[fx.Effect]:
        effects = self.core.handle(event, self.now)
        for effect in effects:
            if isinstance(effect, fx.Save):
                self.ledger.save(effect.record)
        self.effects += effects
        self.batches.append(effects)
        return effects

    def engine(
        self,
        name: str,
        *,
        incarnation: str = "i1",
        devices: tuple[str, ...] = (),
        group: str = "",
        unit: str = "",
        unit_size: int = 0,
        life: int = 0,
    ) -> int:
        """An engine agent says hello, unset. Returns its session."""
        self.sessions += 1
        state = EngineState(RUN, POLICY, EngineId(name), Incarnation(incarnation), Life.RUNNING)
        uuids = tuple(DeviceUuid(d) for d in devices or (f"dev-{name}",))
        place = EnginePlace(EngineId(name), state.incarnation, f"{name}:1", "host", uuids, group, unit, unit_size, life)
        self.states[name] = state
        self.handle(events.EngineConnected(self.sessions, place, state, False, ("checkpoint",), Term(0), Term(0)))
        return self.sessions

    def report(self, session: int, name: str, **changes: object) -> list[fx.Effect]:
        """Its next full state; the gate as an agent computes it."""
        state = self.states[name] = replace(self.states[name], **changes)  # type: ignore[arg-type]
        gate = state.gate_open(frozenset(self.core.served_to(session, POLICY)))
        return self.handle(events.EngineReported(session, state, gate))

    def stage(self, session: int, name: str, update: UpdateTransaction, stage: Stage) -> list[fx.Effect]:
        progress = Progress(
            update.update_id, update.version, stage, error_reason="X" if stage.value == "failed" else ""
        )
        weights: object = self.states[name].weights
        if stage is Stage.APPLIED:
            weights = Held(update.version, b"d")
        elif stage is Stage.FAILED:
            weights = Poisoned("boom")
        return self.report(session, name, progress=progress, weights=weights)

    def stage_all(self, engines: dict[str, int], update: UpdateTransaction, *stages: Stage) -> None:
        """Each engine reports each stage."""
        for stage in stages:
            for name, session in engines.items():
                self.stage(session, name, update, stage)

    def trainer(
        self,
        incarnation: str = "t1",
        *,
        name: str = "trainer",
        held: int = 0,
        ended: str = "",
        takeover: bool = False,
        ranks: tuple[RankPlace, ...] = (RankPlace(Rank(0), "host", DeviceUuid("dev-r0")),),
    ) -> int:
        self.sessions += 1
        self.handle(
            events.TrainerConnected(
                self.sessions,
                RUN,
                POLICY,
                TrainerId(name),
                Incarnation(incarnation),
                ranks,
                Term(held),
                ended,
                takeover,
            )
        )
        return self.sessions

    def begin(self, update_id: str, term: int = 1, request_id: str = "") -> UpdateTransaction:
        effects = self.handle(
            events.UpdateRequested(UpdateId(update_id), request_id or update_id, RUN, POLICY, Term(term), 1, None)
        )
        return next(x.update for x in effects if isinstance(x, fx.UpdatePlanned))

    def push(self, update_id: str, engines: dict[str, int], term: int = 1) -> UpdateTransaction:
        """A whole update that every engine applies."""
        update = self.begin(update_id, term)
        self.stage_all(engines, update, Stage.READY, Stage.INSTALLING, Stage.APPLIED)
        for name, session in engines.items():
            self.report(session, name)
        return update

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.handle(events.Tick())

    @property
    def served(self) -> tuple[WeightVersion, ...]:
        return self.core.model(POLICY).served


def two_engines() -> tuple[Fleet, dict[str, int]]:
    """Two engines and a trainer that holds term 1."""
    f = Fleet()
    engines = {name: f.engine(name) for name in ("e0", "e1")}
    f.trainer()
    return f, engines


def hello(
    session: int,
    name: str = "e0",
    *,
    term: int = 0,
    coordinator_term: int = 0,
    number: int = 0,
    frozen: bytes | None = None,
    model: ModelName = POLICY,
) -> events.EngineConnected:
    state = EngineState(RUN, model, EngineId(name), Incarnation("i"), Life.RUNNING)
    if frozen is not None:
        state = replace(state, frozen=True, weights=Held(FROZEN, frozen))
    place = EnginePlace(EngineId(name), state.incarnation, f"{name}:1", "host", (DeviceUuid(name),))
    return events.EngineConnected(session, place, state, False, (), Term(term), Term(coordinator_term), number)
