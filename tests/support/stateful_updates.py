"""What may befall an update: streams, of a zombie too, commits, installs that fail, and the steps that it should go."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from controlplane.core import engine_effects as fx
from controlplane.core import engine_events as ee
from controlplane.core import errors as e
from controlplane.core.assembly import Record
from controlplane.core.engine_state import Poisoned, Timings
from controlplane.core.update_transaction import Phase
from tests.support.stateful_agent import LAYOUT, MIXTURE, NAMES, POLICY, RUN, Agent, checksum
from tests.support.stateful_devices import SharedFleet


class UpdatedFleet(SharedFleet):
    """Updates by trainers, beside what befalls the engines."""

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

    def coordinator_seen(self, agent: Agent) -> int:
        return agent.core.coordinator_term

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
        for name in self.agents:
            if self.agents[name].session is None:
                self.connect(name)
        if not self.terms:
            self.a_trainer_comes(takeover=True)
        self.everybody_wakes()
        self.publish()
        for _ in range(steps if self.begun else 0):
            for name in self.agents:
                self.go_on(name, 1)
