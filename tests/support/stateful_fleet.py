"""A coordinator's core that Hypothesis moves, its sessions and its trainers; what agents said is carried by hand."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from controlplane.core import engine_events as ee
from controlplane.core import errors as e
from controlplane.core import fleet_effects as fx
from controlplane.core import fleet_events as fe
from controlplane.core.engine_state import EngineState
from controlplane.core.fleet import FleetCore, FleetSettings
from controlplane.core.fleet_records import UpdateBegan
from controlplane.core.plan import EnginePlace, RankPlace
from controlplane.core.update_transaction import Phase
from controlplane.core.versions import DeviceUuid, EngineId, Incarnation, Rank, Term, TrainerId, UpdateId
from controlplane.ledger import MemoryLedger
from tests.support.stateful_agent import DEVICES, NAMES, POLICY, RUN, TTL, Agent, digest_of


@dataclass(frozen=True, slots=True)
class Late:
    """A report in a session that its agent left."""

    name: str
    session: int
    state: EngineState
    gate: bool


class CarriedFleet(RuleBasedStateMachine):
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
        self.old_trainers: list[tuple[int, int]] = []
        """Sessions that another trainer's hello ended, with their terms."""
        self.progress = 0
        self.begun: list[UpdateBegan] = []
        self.contents: dict[int, int] = {}
        """By number: which weights it is. A rollback's are an older number's."""
        self.carries: list[tuple[fx.Carry, int]] = []
        """With the coordinator's term when they began."""
        self.said: dict[str, tuple[EngineState, bool]] = {}
        self.late: list[Late] = []
        """On their way in sessions that their agents left, or died in."""
        self.fleet: FleetCore
        self.restart_coordinator()

    # ---- carrying ----

    def handle(self, event: fe.Event) -> list[fx.Effect]:
        effects = self.fleet.handle(event, self.now)
        for effect in effects:
            if isinstance(effect, fx.Save):
                if isinstance(effect.record, UpdateBegan):
                    self.note_begun(effect.record)
                self.ledger.save(effect.record)
        for effect in effects:
            if isinstance(effect, fx.CloseSession):
                for agent in self.agents.values():
                    if agent.session == effect.session:
                        self.cut(agent)
            elif isinstance(effect, fx.StartCarry):
                assert not self.fleet.lent(self.fleet.engines[effect.carry.engine.engine_id]) or (
                    effect.carry.waits_for_go
                ), "a trainer holds its devices"
                self.carries.append((effect.carry, self.fleet.term))
            elif isinstance(effect, fx.BroadcastState):
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
        self.leave_behind(agent)
        agent.session = None

    def leave_behind(self, agent: Agent) -> None:
        """What it said in its session may arrive late."""
        if agent.session is not None:
            self.late += [Late(agent.name, agent.session, *report) for report in agent.reports]
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
        self.late.clear()  # connections end with the process that they led to
        self.old_trainers.clear()

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
        self.leave_behind(agent)
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

    @precondition(lambda self: self.late)
    @rule(index=st.integers(0, 30))
    def a_late_word_arrives(self, index: int) -> None:
        """Of a session that was left: after what was said in later ones. One session's words keep their order."""
        chosen = self.late[index % len(self.late)].session
        word = next(late for late in self.late if late.session == chosen)
        self.late.remove(word)
        record = self.fleet.engines.get(EngineId(word.name))
        if record is not None and record.session == word.session:  # its end was not heard yet
            self.said[word.name] = (word.state, word.gate)
        self.handle(fe.EngineReported(word.session, word.state, word.gate))

    @precondition(lambda self: self.late)
    @rule(index=st.integers(0, 30))
    def a_sessions_end_is_heard_late(self, index: int) -> None:
        session = self.late[index % len(self.late)].session
        self.late = [late for late in self.late if late.session != session]
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
        except (e.LeaseHeld, e.CoordinatorRecovering):
            return
        if self.trainer_session:
            self.old_trainers.append((self.trainer_session, self.held_term))
        self.held_term, self.trainer_session = self.fleet.model(POLICY).term, session
        self.terms.append(self.held_term)

    @precondition(lambda self: self.old_trainers)
    @rule(index=st.integers(0, 30), ends=st.booleans())
    def a_fenced_trainers_word_arrives_late(self, index: int, ends: bool) -> None:
        session, term = self.old_trainers[index % len(self.old_trainers)]
        before = copy(self.fleet.trainers.get(POLICY))
        late = fe.TrainerReported(session, Term(term), 99, "train", 10**6, holds_devices=True)
        self.handle(fe.SessionEnded(session, goodbye=True) if ends else late)
        assert self.fleet.trainers.get(POLICY) == before, "INV-7"

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
