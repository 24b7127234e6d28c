"""What else may befall engines: sleep and waking, lent devices, drains, crashes, operators, wrong spans."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import rule

from controlplane.core import engine_events as ee
from controlplane.core import errors as e
from controlplane.core import fleet_events as fe
from controlplane.core.engine_state import Hold, HoldKind, Residency
from controlplane.core.versions import Term
from tests.support.stateful_agent import NAMES
from tests.support.stateful_fleet import CarriedFleet


class SharedFleet(CarriedFleet):
    """Devices, lives and holds."""

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
        self.leave_behind(agent)
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
