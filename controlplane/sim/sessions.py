"""The coordinator's sessions: hello, welcome, reports, what each is told, and how one ends."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from controlplane.core import errors as e
from controlplane.core import fleet_effects as fx
from controlplane.core import fleet_events as fe
from controlplane.core.engine_state import EngineState
from controlplane.core.fleet import FleetCore
from controlplane.core.versions import Term
from controlplane.sim.disks import LedgerDisk
from controlplane.sim.kernel import Process, Stream
from controlplane.sim.news import FleetNews, ModelNews
from controlplane.sim.surroundings import Surroundings


@dataclass
class Session:
    """An agent's stream. `welcomed` and `told` deliver frames at the agent."""

    stream: Stream
    welcomed: Callable[[FleetNews, Term], None]
    told: Callable[[FleetNews], None]
    number: int = 0
    greeted: bool = False
    """The agent had its welcome."""


class Sessions(Process):
    """Those of one coordinator, as agents and trainers reach it. What an event means is the subclass's to say."""

    core: FleetCore

    def __init__(self, around: Surroundings, name: str) -> None:
        super().__init__(around.kernel, name)
        self.around = around
        self.ledger = LedgerDisk(lambda: around.faults.writing(self), lambda: around.kernel.now)
        self.sessions: dict[int, Session] = {}
        self._next_session = 0

    @abstractmethod
    def handle(self, event: fe.Event) -> list[fx.Effect]:
        """Decide and carry out. Raises the core's refusals."""

    def hello(self, session: Session, event: Callable[[int], fe.Event]) -> None:
        """The first frame of a session; `event` makes it, given the session's number."""
        self._next_session += 1
        number = session.number = self._next_session
        self.sessions[number] = session
        session.stream.on_server_end = lambda: self._ended(number)
        self.said(session, lambda: event(number))

    def said(self, session: Session, event: Callable[[], fe.Event]) -> None:
        """A frame. A refusal ends the session."""
        try:
            self.handle(event())
        except e.WeightplaneError as error:
            self._end(session, error)

    def report(self, session: Session, state: EngineState, gate_open: bool) -> None:
        number = self._number(session)
        if number is not None:
            self.said(session, lambda: fe.EngineReported(number, state, gate_open))

    def progress(self, session: Session, event: Callable[[int], fe.TrainerReported]) -> None:
        number = self._number(session)
        if number is not None:
            self.said(session, lambda: event(number))

    def goodbye(self, session: Session) -> None:
        number = self._number(session)
        if number is not None:
            self.sessions.pop(number)
            session.stream.refuse(e.PeerLost(peer="the agent", cause="it said goodbye"))
            self.handle(fe.SessionEnded(number, goodbye=True))

    def _number(self, session: Session) -> int | None:
        return session.number if self.sessions.get(session.number) is session else None

    def _end(self, session: Session, error: e.WeightplaneError) -> None:
        number = self._number(session)
        session.stream.refuse(error)
        if number is not None:
            self.after(0.0, lambda: self._ended(number))

    def close(self, number: int, error: e.WeightplaneError) -> None:
        session = self.sessions.get(number)
        if session is not None:
            self.around.witness.refused(error)
            self._end(session, error)

    def _ended(self, number: int) -> None:
        if self.sessions.pop(number, None) is not None:
            self.handle(fe.SessionEnded(number, goodbye=False))

    # ---- telling ----

    def news(self, session: int) -> FleetNews:
        models = tuple(
            ModelNews(n, m.term, self.core.served_to(session, n)) for n, m in sorted(self.core.models.items())
        )
        return FleetNews(self.core.term, models, dict(self.core.doubts))

    def welcome(self, number: int, term: Term) -> None:
        session, news = self.sessions.get(number), self.news(number)
        self.around.witness.told_state(self, number, news)
        if term:
            self.around.witness.told_term(self, number, term)
        if session is not None:
            session.stream.to_client(lambda: session.welcomed(news, term))

    def broadcast(self) -> None:
        for number, session in self.sessions.items():
            if session.stream.broken:  # its end is being told
                continue
            news = self.news(number)
            self.around.witness.told_state(self, number, news)
            session.stream.to_client(lambda told=session.told, news=news: told(news))  # type: ignore[misc]
