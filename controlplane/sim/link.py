"""An engine agent's session with the coordinator: hello, welcome, the fleet's state, heartbeats, goodbye."""

from __future__ import annotations

from collections.abc import Callable

from controlplane.core import engine_events as ee
from controlplane.core import errors as e
from controlplane.core import fleet_events as fe
from controlplane.sim.kernel import Crashed, connect
from controlplane.sim.life import Life
from controlplane.sim.news import FleetNews
from controlplane.sim.sessions import Session, Sessions
from controlplane.sim.surroundings import Surroundings

RECONNECT_SECONDS = (0.1, 0.6)
WELCOME_SECONDS = 3.0
FATAL = (e.WrongRun, e.IncompatibleNode, e.WrongIncarnation, e.ModelFrozen, e.VersionConflict)
"""Refusals of a session that end the agent's process; its launcher starts it again."""


class Link:
    """That of one incarnation, over as many sessions as it takes."""

    def __init__(self, life: Life, coordinator: Sessions, around: Surroundings) -> None:
        self._life = life
        self._agent = life.agent
        self._coordinator = coordinator
        self._around = around
        self._session: Session | None = None
        self._sends = False

    def connect(self) -> None:
        stream = connect(self._agent, self._coordinator)
        if stream is None:
            self._later()
            return
        session = Session(stream, lambda news, term: self._welcome(session, news), lambda news: self._told(news))
        self._session = session
        stream.on_client_end = lambda error: self._lost(session, error)
        hello, coordinator = self._hello(), self._coordinator
        stream.to_server(lambda: coordinator.hello(session, hello))
        self._life.after(WELCOME_SECONDS, lambda: self._give_up(session))

    def end(self) -> None:
        """The life is over: its last words, then nothing more."""
        self._send_status()
        if self._session is not None:
            self._session.stream.cancel()

    def goodbye(self) -> None:
        session, coordinator = self._session, self._coordinator
        if session is not None:
            session.stream.to_server(lambda: coordinator.goodbye(session))

    def _hello(self) -> Callable[[int], fe.Event]:
        core, gate = self._life.core, self._life.core.gate_open
        state, term, coordinator_term, number = core.state, core.term, core.coordinator_term, core.number
        place, capabilities = (
            self._agent.seat.place(state.incarnation, self._agent.lives),
            tuple(sorted(core.capabilities)),
        )
        return lambda session: fe.EngineConnected(
            session, place, state, gate, capabilities, term, coordinator_term, number
        )

    def _give_up(self, session: Session) -> None:
        """No welcome came in time."""
        if self._session is session and not session.greeted:
            session.stream.cancel()
            self._again()

    def _lost(self, session: Session, error: e.WeightplaneError) -> None:
        if self._life.over or self._session is not session:
            return
        if isinstance(error, FATAL):
            self._agent.crash()
            raise Crashed
        self._again()

    def _again(self) -> None:
        self._session = None
        self._later()

    def _later(self) -> None:
        self._life.after(self._around.kernel.rng.uniform(*RECONNECT_SECONDS), self.connect)

    # ---- what is told ----

    def _welcome(self, session: Session, news: FleetNews) -> None:
        if self._session is not session:
            return
        session.greeted = True
        self._told(news)
        self._beat(session)

    def _told(self, news: FleetNews) -> None:
        """INV-7: terms come before any update. An old coordinator's words end its session."""
        model = news.model(self._agent.spec.name)
        session = self._session
        if self._life.over or session is None or model is None:
            return
        try:
            self._doubted(news)
            self._life.apply(ee.FleetChanged(news.coordinator_term, model.term, frozenset(model.served)))
        except e.StaleTerm:
            session.stream.cancel()
            self._again()

    def _doubted(self, news: FleetNews) -> None:
        state = self._life.core.state
        doubt = news.doubts.get(state.engine_id)
        if doubt is not None and doubt.incarnation == state.incarnation:
            self._life.apply(ee.Doubted(doubt.version, doubt.cause))
            self._around.witness.heard_doubt(self._life, doubt.version)

    # ---- what is said ----

    def _beat(self, session: Session) -> None:
        if self._session is session:
            self._send_status()
            self._life.after(self._around.settings.heartbeat, lambda: self._beat(session))

    def send_soon(self) -> None:
        """The state changed."""
        if not self._sends:
            self._sends = True
            self._life.after(self._around.kernel.rng.uniform(0.0, 0.02), self._send_status)

    def _send_status(self) -> None:
        """The newest state only; those between were nobody's business."""
        self._sends = False
        session = self._session
        if session is None or not session.greeted:
            return
        state, gate, coordinator = self._life.core.state, self._life.core.gate_open, self._coordinator
        session.stream.to_server(lambda: coordinator.report(session, state, gate))
        self._around.faults.point(self._agent, "engine.after_report")
