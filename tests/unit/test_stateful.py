"""FleetCore, EngineCore and MemoryLedger together, under any order of what may happen to them.

Hypothesis chooses: publish, ack, nack, lose, double and hold back reports, crash, restart, pause, take over, wake a
zombie, sleep and wake, take and give devices, drain, keep checkpoints, catch up, roll back. After each step the claims
are compared with what really lies in the engines and on the ledger.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from controlplane.core import engine_effects as fx
from controlplane.core import engine_events as ee
from controlplane.core import errors as e
from controlplane.core import fleet_events as fe
from controlplane.core.assembly import Record
from controlplane.core.engine_core import DROPS_WEIGHTS, SLEEP, EngineCore
from controlplane.core.engine_state import EngineState, Held, Hold, HoldKind, Poisoned, Residency, Timings
from controlplane.core.fleet import FleetCore, FleetSettings
from controlplane.core.fleet_records import CheckpointKept, UpdateBegan
from controlplane.core.layout import DType, Expected, Layout, TensorSpec, content_digest
from controlplane.core.plan import EnginePlace, RankPlace
from controlplane.core.update_transaction import Phase
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

RUN, POLICY = RunId("run"), ModelName("policy")
LAYOUT = Layout((TensorSpec("w", DType.F32, (4,)),))
EXPECTED = Expected(shapes={"w": (4,)}, dtypes={"w": frozenset({DType.F32})})
TTL = 10.0
NAMES = st.sampled_from(["e0", "e1", "e2"])
MIXTURE = b"mixture"
DROPPED = b"dropped"
DEVICES = {"e0": "gpu-t", "e1": "gpu-e1", "e2": "gpu-e2"}
"""The trainer's device is e0's too."""


def checksum(number: int) -> bytes:
    return number.to_bytes(8, "big")


def digest_of(content: int) -> bytes:
    return content_digest([checksum(content)])


@dataclass
class Agent:
    """One engine agent: its disk outlives its lives."""

    name: str
    life: int = 0
    disk: fx.Remember = field(default_factory=lambda: fx.Remember(Term(0), Term(0), 0))
    seen_term: int = 0
    session: int | None = None
    reports: deque[tuple[EngineState, bool]] = field(default_factory=deque)
    """On their way to the coordinator."""
    streams: int = 0
    open_stream: int | None = None
    content: bytes = b"initial"
    quiesced: bool = False
    highest: int = -1
    asleep: bool = False
    """Its memory is somebody else's, whatever anybody says."""
    waking: fx.StartWake | None = None
    core: EngineCore = field(init=False)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.life += 1
        state = EngineState(RUN, POLICY, EngineId(self.name), Incarnation(f"{self.name}/{self.life}"))
        self.core = EngineCore(
            state, term=self.disk.term, coordinator_term=self.disk.coordinator_term, number=self.disk.number
        )
        self.session, self.open_stream, self.quiesced, self.content, self.highest = None, None, False, b"initial", -1
        self.asleep, self.waking = False, None
        self.reports.clear()
        self.handle(ee.Started(EXPECTED, frozenset({SLEEP})))

    def handle(self, event: ee.Event) -> list[fx.Effect]:
        before = self.core.state
        try:
            effects = self.core.handle(event, 0.0)
        except e.Refused:
            assert self.core.state == before
            raise
        for effect in effects:
            if isinstance(effect, fx.Remember):
                self.disk = effect
            elif isinstance(effect, fx.StartSleep):
                self.asleep = True
                self.content = DROPPED if effect.level == DROPS_WEIGHTS else self.content
            elif isinstance(effect, fx.StartWake):
                self.waking = effect
            elif isinstance(effect, fx.Report) and self.session is not None:
                self.reports.append((self.core.state, self.core.gate_open))
        return effects


class FleetMachine(RuleBasedStateMachine):
    """Three engines, one coordinator, any number of trainers."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.ledger = MemoryLedger()
        self.agents = {name: Agent(name) for name in ("e0", "e1", "e2")}
        self.ids = 0
        self.numbers: list[int] = []
        self.terms: list[int] = []
        self.held_term = 0
        self.trainer_session = 0
        self.progress = 0
        self.begun: list[UpdateBegan] = []
        self.contents: dict[int, int] = {}
        """By number: which weights it is. A rollback's are an older number's."""
        self.carries: list[tuple[fe.Carry, int]] = []
        """With the coordinator's term when they began."""
        self.said: dict[str, tuple[EngineState, bool]] = {}
        self.fleet: FleetCore
        self.restart_coordinator()

    # ---- carrying ----

    def handle(self, event: fe.Event) -> list[fe.Effect]:
        effects = self.fleet.handle(event, self.now)
        for effect in effects:
            if isinstance(effect, fe.Save):
                if isinstance(effect.record, UpdateBegan):
                    self.note_begun(effect.record)
                self.ledger.save(effect.record)
        for effect in effects:
            if isinstance(effect, fe.CloseSession):
                for agent in self.agents.values():
                    if agent.session == effect.session:
                        self.cut(agent)
            elif isinstance(effect, fe.StartCarry):
                assert not self.fleet.lent(self.fleet.engines[effect.carry.engine.engine_id]) or (
                    effect.carry.waits_for_go
                ), "a trainer holds its devices"
                self.carries.append((effect.carry, self.fleet.term))
            elif isinstance(effect, fe.BroadcastState):
                for agent in self.agents.values():
                    if agent.session is not None:
                        self.tell(agent)
        return effects

    def note_begun(self, record: UpdateBegan) -> None:
        number = record.version.number
        self.numbers.append(number)
        self.contents[number] = number if record.restores is None else self.contents[record.restores.number]
        self.begun += [record] if record.restores is None else []

    def truth(self, number: int) -> bytes:
        """The content of a version."""
        return digest_of(self.contents[number])

    def cut(self, agent: Agent) -> None:
        agent.session = None
        agent.reports.clear()

    def tell(self, agent: Agent) -> None:
        model = self.fleet.model(POLICY)
        agent.handle(ee.FleetChanged(self.fleet.term, model.term, frozenset(model.served)))
        agent.seen_term = max(agent.seen_term, model.term)

    def next_id(self) -> int:
        self.ids += 1
        return self.ids

    # ---- the coordinator ----

    @rule()
    def restart_coordinator(self) -> None:
        self.fleet = FleetCore(FleetSettings(RUN, lease_ttl_seconds=TTL), self.ledger.open(RUN), self.now)
        for agent in self.agents.values():
            self.cut(agent)

    @rule(seconds=st.sampled_from([0.5, 4.0, 11.0, 130.0]))
    def time_goes_by(self, seconds: float) -> None:
        self.now += seconds
        self.handle(fe.Tick())

    # ---- sessions and reports ----

    @rule(name=NAMES)
    def connect(self, name: str) -> None:
        agent = self.agents[name]
        state, gate = agent.core.state, agent.core.gate_open
        place = EnginePlace(state.engine_id, state.incarnation, f"{name}:1", "host", (DeviceUuid(DEVICES[name]),))
        agent.reports.clear()
        session = agent.session = self.next_id()
        self.said[name] = (state, gate)
        core = agent.core
        self.handle(
            fe.EngineConnected(
                session, place, state, gate, ("checkpoint",), core.term, core.coordinator_term, core.number
            )
        )
        self.tell(agent)

    @rule(name=NAMES, twice=st.booleans())
    def a_report_arrives(self, name: str, twice: bool) -> None:
        agent = self.agents[name]
        if agent.reports and agent.session is not None:
            state, gate = agent.reports.popleft()
            for _ in range(1 + twice):
                if agent.session is not None:
                    self.said[name] = (state, gate)
                    self.handle(fe.EngineReported(agent.session, state, gate))

    @rule(name=NAMES)
    def everything_it_said_arrives(self, name: str) -> None:
        while self.agents[name].reports:
            self.a_report_arrives(name, twice=False)

    @rule(name=NAMES)
    def a_session_breaks(self, name: str) -> None:
        agent = self.agents[name]
        if agent.session is not None:
            session = agent.session
            self.cut(agent)
            self.handle(fe.SessionEnded(session, goodbye=False))

    # ---- trainers ----

    @rule(takeover=st.booleans())
    def a_trainer_comes(self, takeover: bool) -> None:
        session = self.next_id()
        place = RankPlace(Rank(0), "host", DeviceUuid("gpu-t"))
        name = TrainerId(f"t{session}")
        event = fe.TrainerConnected(
            session, RUN, POLICY, name, Incarnation(name), (place,), Term(0), "", takeover or not self.terms
        )
        try:
            self.handle(event)
        except e.LeaseHeld:
            return
        self.held_term, self.trainer_session = self.fleet.model(POLICY).term, session
        self.terms.append(self.held_term)

    @rule()
    def publish(self) -> None:
        update_id = UpdateId(f"u{self.next_id()}")
        try:
            self.handle(fe.UpdateRequested(update_id, update_id, RUN, POLICY, Term(self.held_term), 1, None))
        except (e.NoEngines, e.UpdateInProgress, e.CoordinatorRecovering, e.StaleTerm):
            return

    @rule()
    def give_up(self) -> None:
        update = self.fleet.open_update(POLICY)
        if update is not None and update.phase is Phase.PREPARING:
            self.handle(fe.AbortRequested(RUN, update.update_id, Term(self.held_term), "enough"))

    # ---- streams: of the present update, or a zombie's ----

    @precondition(lambda self: self.begun)
    @rule(name=NAMES, back=st.integers(0, 2))
    def open(self, name: str, back: int) -> None:
        agent, began = self.agents[name], self.begun[max(len(self.begun) - 1 - back, 0)]
        agent.streams += 1
        event = ee.Opened(
            agent.streams,
            RUN,
            POLICY,
            agent.core.state.incarnation,
            began.update_id,
            began.version.term,
            began.version,
            LAYOUT.digest,
            1,
            LAYOUT.byte_count,
        )
        try:
            effects = agent.handle(event)
        except (e.StaleTerm, e.StaleVersion, e.UpdateInProgress, e.NotWelcomed, e.EngineAsleep, e.EngineDraining):
            return
        assert began.version.term >= agent.seen_term, "INV-7"
        accept = next(x for x in effects if isinstance(x, fx.Accept))
        agent.seen_term = max(agent.seen_term, began.version.term)
        if accept.attached:
            done = agent.core.state.installing or agent.content == self.truth(began.version.number)
            assert done, "INV-6"
            return
        assert began.version.number >= agent.highest, "INV-5"
        agent.open_stream = agent.streams
        if accept.layout_needed:
            agent.handle(ee.LayoutArrived(agent.streams, LAYOUT))

    @rule(name=NAMES)
    def bytes_arrive(self, name: str) -> None:
        agent = self.agents[name]
        update = agent.core.update
        if update is None or agent.open_stream != update.stream or update.verified or agent.core.state.installing:
            return
        record = Record(0, 0, 0, LAYOUT.byte_count, checksum(self.contents[update.version.number]))
        agent.handle(ee.ChunkArrived(update.stream, update.version, 0, (record,), LAYOUT.byte_count))
        agent.handle(ee.BytesVerified(update.stream))

    @rule(name=NAMES)
    def a_stream_ends(self, name: str) -> None:
        agent = self.agents[name]
        if agent.open_stream is not None:
            before = agent.core.state.applied
            effects = agent.handle(ee.StreamEnded(agent.open_stream, "gone"))
            assert not any(isinstance(x, fx.StartInstall) for x in effects), "INV-3"
            assert agent.core.state.applied == before, "INV-4"
            agent.open_stream = None

    @rule(name=NAMES, honest=st.booleans())
    def a_commit_arrives(self, name: str, honest: bool) -> None:
        agent = self.agents[name]
        update = agent.core.update
        if update is None or update.stream != agent.open_stream:
            return
        known = self.fleet.updates.get(update.update_id)
        if known is not None and known.phase in (Phase.PREPARING, Phase.FAILED):
            return  # no writer sends it before go
        digest = self.truth(update.version.number) if honest else b"x" * 32
        event = ee.CommitArrived(update.stream, update.version, 1, LAYOUT.byte_count, digest)
        try:
            agent.handle(event)
        except e.Refused:
            return
        assert honest, "INV-3"
        fenced_by = self.coordinator_seen(agent) if update.by_coordinator else agent.seen_term
        assert update.writer_term >= fenced_by, "INV-7"

    # ---- installs ----

    @rule(name=NAMES)
    def quiesce(self, name: str) -> None:
        agent = self.agents[name]
        if agent.core.state.installing and not agent.quiesced:
            assert not agent.asleep, "P2"
            agent.handle(ee.Quiesced())
            agent.quiesced, agent.before = True, agent.content  # type: ignore[attr-defined]
            agent.content = MIXTURE

    @rule(name=NAMES, how=st.sampled_from(["works", "works", "untouched", "touched"]))
    def an_install_ends(self, name: str, how: str) -> None:
        agent = self.agents[name]
        update = agent.core.update
        if not agent.quiesced or update is None or not agent.core.state.installing:
            return
        agent.quiesced = False
        if how == "works":
            agent.content = self.truth(update.version.number)
            agent.handle(ee.CanaryPassed(Timings()))
            assert update.version.number >= agent.highest or update.by_coordinator, "INV-5"
            agent.highest = max(agent.highest, update.version.number)
            return
        error = e.InstallFailed(name, str(update.version), how == "touched", "boom")
        if how == "untouched":
            agent.content = agent.before  # type: ignore[attr-defined]
        agent.handle(ee.InstallEnded(error, how == "touched"))
        if how == "touched":
            assert isinstance(agent.core.state.weights, Poisoned), "INV-4"

    # ---- an update as it should go, so that the rare steps start from deep states ----

    @precondition(lambda self: self.begun)
    @rule(name=NAMES, steps=st.integers(1, 7))
    def go_on(self, name: str, steps: int) -> None:
        """The next honest steps of the latest update on this engine."""
        agent = self.agents[name]
        for _ in range(steps):
            if agent.session is None:
                self.connect(name)
            elif agent.core.state.installing:
                self.quiesce(name)
                self.an_install_ends(name, "works")
            elif agent.open_stream is None or agent.core.update is None:
                self.open(name, 0)
            elif not agent.core.update.verified:
                self.bytes_arrive(name)
            else:
                self.a_commit_arrives(name, honest=True)
            self.everything_it_said_arrives(name)

    @rule(steps=st.integers(1, 8))
    def push(self, steps: int) -> None:
        """A new update, as far as `steps` brings it on every engine."""
        if not self.terms:
            self.a_trainer_comes(takeover=True)
        for name in self.agents:
            if self.agents[name].session is None:
                self.connect(name)
        self.everybody_wakes()
        self.publish()
        for _ in range(steps if self.begun else 0):
            for name in self.agents:
                self.go_on(name, 1)

    # ---- the coordinator as a writer ----

    def coordinator_seen(self, agent: Agent) -> int:
        return agent.core.coordinator_term

    @rule()
    def keep_a_checkpoint(self) -> None:
        served = self.fleet.model(POLICY).served
        if not served or not self.held_term:
            return
        digest = self.truth(served[-1].number)
        kept = CheckpointKept(POLICY, served[-1], f"c{served[-1].number}", LAYOUT.digest, digest, 1, 1, 16)
        try:
            self.handle(fe.CheckpointPublished(RUN, Term(self.held_term), kept))
        except (e.StaleTerm, e.VersionUnavailable):
            return

    @rule(back=st.integers(0, 3))
    def roll_back(self, back: int) -> None:
        numbers = sorted(self.fleet.model(POLICY).checkpoints)
        if not numbers:
            return
        update_id = UpdateId(f"r{self.next_id()}")
        number = numbers[max(len(numbers) - 1 - back, 0)]
        self.everybody_wakes()
        try:
            self.handle(fe.RollbackRequested(update_id, update_id, RUN, POLICY, number))
        except (e.NoEngines, e.UpdateInProgress, e.CoordinatorRecovering):
            return

    @precondition(lambda self: self.carries)
    @rule(index=st.integers(0, 5))
    def a_carry_opens(self, index: int) -> None:
        """Perhaps long after, of a coordinator that is gone, for a life that is gone."""
        carry, term = self.carries[index % len(self.carries)]
        agent = self.agents[carry.engine.engine_id]
        agent.streams += 1
        event = ee.Opened(
            agent.streams,
            RUN,
            POLICY,
            carry.engine.incarnation,
            carry.update_id,
            Term(term),
            carry.version,
            LAYOUT.digest,
            1,
            LAYOUT.byte_count,
            by_coordinator=True,
        )
        before = agent.core.state.applied
        try:
            effects = agent.handle(event)
        except e.Refused as error:
            self.handle(fe.CarryEnded(carry.update_id, carry.engine.engine_id, error))
            return
        assert term >= agent.core.coordinator_term, "INV-7"
        accept = next(x for x in effects if isinstance(x, fx.Accept))
        if accept.attached:
            return
        assert before is None or carry.version.number > before.number, "INV-5"
        agent.open_stream = agent.streams
        if accept.layout_needed:
            agent.handle(ee.LayoutArrived(agent.streams, LAYOUT))

    @precondition(lambda self: self.carries)
    @rule(index=st.integers(0, 12), works=st.booleans())
    def a_carry_ends(self, index: int, works: bool) -> None:
        if index >= len(self.carries):
            return
        carry, _ = self.carries.pop(index)
        error = None if works else e.PeerLost(peer=carry.engine.engine_id, cause="gone")
        self.handle(fe.CarryEnded(carry.update_id, carry.engine.engine_id, error))

    @precondition(lambda self: self.carries)
    @rule(steps=st.integers(1, 12))
    def the_carries_go_on(self, steps: int) -> None:
        """The next honest steps of every carry, and what the engines say of it."""
        self.everybody_wakes()
        for _ in range(steps):
            for index, (carry, _) in enumerate(list(self.carries)):
                name = carry.engine.engine_id
                agent = self.agents[name]
                update = agent.core.update
                if agent.core.state.installing:
                    self.quiesce(name)
                    self.an_install_ends(name, "works")
                elif update is None or update.update_id != carry.update_id:
                    self.a_carry_opens(index)
                elif not update.verified:
                    self.bytes_arrive(name)
                else:
                    self.a_commit_arrives(name, honest=True)
                self.everything_it_said_arrives(name)

    # ---- devices ----

    @rule()
    def everybody_wakes(self) -> None:
        """Whoever put an engine to sleep, or drains it, ends that."""
        for agent in self.agents.values():
            for hold in sorted(agent.core.state.holds, key=str):
                if hold.kind in (HoldKind.ASLEEP, HoldKind.DRAINING):
                    agent.handle(ee.HoldChanged(hold, present=False))
            if agent.core.state.residency is not Residency.AWAKE:
                agent.handle(ee.WakeRequested("trainer", kv=True))
            self.a_wake_ends(agent.name)
            self.everything_it_said_arrives(agent.name)

    @rule(name=NAMES, owner=st.sampled_from(["trainer", "ann"]), level=st.sampled_from([1, 2]))
    def sleep(self, name: str, owner: str, level: int) -> None:
        try:
            self.agents[name].handle(ee.SleepRequested(owner, level))
        except e.UpdateInProgress:
            assert self.agents[name].core.state.installing

    @rule(name=NAMES, owner=st.sampled_from(["trainer", "ann"]), kv=st.booleans())
    def wake(self, name: str, owner: str, kv: bool) -> None:
        agent = self.agents[name]
        others = [h for h in agent.core.state.holds if h.kind is HoldKind.ASLEEP and h.owner != owner]
        try:
            agent.handle(ee.WakeRequested(owner, kv))
        except e.DevicesTaken:
            assert others

    @rule(name=NAMES)
    def a_wake_ends(self, name: str) -> None:
        agent = self.agents[name]
        if agent.waking is not None:
            kv, agent.waking = agent.waking.kv, None
            slept_again = not agent.core._power._waking
            agent.asleep = agent.asleep and slept_again
            agent.handle(ee.Woke(kv))

    @rule(take=st.booleans())
    def take_or_give_devices(self, take: bool) -> None:
        """The trainer shares e0's device."""
        self.progress += 1
        report = fe.TrainerReported(self.trainer_session, Term(self.held_term), 1, "train", self.progress, take)
        self.handle(report)
        if take:
            self.sleep("e0", "trainer", 1)
        else:
            self.wake("e0", "trainer", kv=True)
            self.a_wake_ends("e0")

    @rule(name=NAMES, present=st.booleans())
    def drain(self, name: str, present: bool) -> None:
        self.agents[name].handle(ee.HoldChanged(Hold(HoldKind.DRAINING, "ann"), present))

    # ---- lives and holds ----

    @rule(name=NAMES)
    def crash(self, name: str) -> None:
        """The agent and its engine die; the coordinator hears it now or when its successor comes."""
        agent = self.agents[name]
        session = agent.session
        agent.restart()
        if session is not None and self.ids % 2:
            self.handle(fe.SessionEnded(session, goodbye=False))

    @rule(name=NAMES, present=st.booleans())
    def operate(self, name: str, present: bool) -> None:
        self.agents[name].handle(ee.HoldChanged(Hold(HoldKind.OPERATOR, "ann"), present))

    @rule(name=NAMES)
    def spans_disagree(self, name: str) -> None:
        agent = self.agents[name]
        if not agent.core.state.installing:
            agent.handle(ee.SpansDisagreed("counted wrongly"))

    # ---- what always holds ----

    @invariant()
    def inv1_a_claim_is_what_the_engine_holds(self) -> None:
        for agent in self.agents.values():
            weights = agent.core.state.weights
            if isinstance(weights, Held) and not agent.core.state.installing:
                assert agent.content == self.truth(weights.version.number) == weights.content_digest

    @invariant()
    def inv4_a_gate_is_open_on_whole_and_served_weights_only(self) -> None:
        for agent in self.agents.values():
            if agent.core.gate_open:
                assert agent.content not in (MIXTURE, DROPPED)
                assert not agent.asleep
                assert agent.core.state.applied in agent.core.served
                assert not agent.core.state.holds

    @invariant()
    def inv7_what_an_agent_saw_is_on_its_disk(self) -> None:
        assert all(a.disk.term >= a.seen_term for a in self.agents.values())

    @invariant()
    def inv8_a_record_is_what_the_engine_said(self) -> None:
        for engine_id, record in self.fleet.engines.items():
            if record.session is not None and record.session == self.agents[engine_id].session:
                assert record.state == self.said[engine_id][0]

    @invariant()
    def inv9_what_is_served_is_on_the_ledger(self) -> None:
        model = self.ledger._models().get(POLICY)
        assert tuple(self.fleet.model(POLICY).served) == (model.served if model is not None else ())

    @invariant()
    def inv10_a_route_leads_to_an_open_gate(self) -> None:
        for engine_id, record in self.fleet.engines.items():
            if self.fleet.routable(record):
                state, gate = self.said[engine_id]
                assert record.session is not None
                assert gate
                assert state.applied in self.fleet.model(POLICY).served

    @invariant()
    def numbers_and_terms_only_grow(self) -> None:
        assert self.numbers == sorted(set(self.numbers))
        assert self.terms == sorted(set(self.terms))


TestFleet = FleetMachine.TestCase
TestFleet.settings = settings(
    max_examples=250,
    stateful_step_count=80,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
