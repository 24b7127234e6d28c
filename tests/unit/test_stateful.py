"""FleetCore, EngineCore and MemoryLedger together, under any order of what may happen to them.

Hypothesis chooses: publish, ack, nack, lose, double, hold back and reorder reports (one session's words keep their
order, as a stream's do; an old session's come after a new one's), crash, restart, pause, take over, wake a zombie,
sleep and wake, take and give devices, drain, keep checkpoints, catch up, roll back. After each step the claims are
compared with what really lies in the engines and on the ledger.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from controlplane.core import engine_effects as fx
from controlplane.core import engine_events as ee
from controlplane.core import errors as e
from controlplane.core import fleet_events as fe
from controlplane.core.engine_state import Held
from controlplane.core.fleet_records import CheckpointKept
from controlplane.core.versions import Term, UpdateId
from tests.support.stateful_agent import DROPPED, LAYOUT, MIXTURE, POLICY, RUN
from tests.support.stateful_updates import UpdatedFleet


class FleetMachine(UpdatedFleet):
    """Everything that may happen, and the coordinator as a writer too."""

    # ---- the coordinator as a writer ----

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
