"""A trainer agent's process: its lease, and pushes one after the other, as `trainer_agent` makes them.

A lease is asked for until it is granted; STALE_TERM ends the process for good (it was fenced). A push begins, brings
the version to every engine of the plan, sends commit frames only after GO, and believes the coordinator's decision
only. A push that failed is begun again with a new number.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from controlplane.core import errors as e
from controlplane.core import fleet_events as fe
from controlplane.core.plan import RankPlace
from controlplane.core.versions import DeviceUuid, Incarnation, Rank, Term, TrainerId
from controlplane.sim.coordinator import FleetNews, Session
from controlplane.sim.kernel import Crashed, Process, connect
from controlplane.sim.push import Push
from controlplane.sim.settings import POLICY

if TYPE_CHECKING:
    from controlplane.sim.world import World

BACKOFF_SECONDS = (0.2, 0.8)


class Trainer(Process):
    """One trainer; `takeover` is whether its next hello insists."""

    def __init__(self, world: World, name: str, *, takeover: bool = False) -> None:
        super().__init__(world.kernel, name)
        self.world = world
        self.takeover = takeover
        self.fenced = False
        self.lives = 0
        self.term = Term(0)
        self.step = 0
        self.pushed = 0
        """Pushes that the fleet committed."""
        self.push: Push | None = None
        self._ended = ""
        self._session: Session | None = None
        self._progress = 0

    def boot(self) -> None:
        """Its ranks' earlier life is proven dead by its being here."""
        self._ended = self.incarnation if self.lives else ""
        self.lives += 1
        self.term, self.push, self._session, self._progress = Term(0), None, None, 0
        self._connect()

    @property
    def incarnation(self) -> Incarnation:
        return Incarnation(f"{self.name}/{self.lives}")

    def fence(self) -> None:
        """STALE_TERM: the process ends, and no launcher starts it again."""
        self.fenced = True
        self.crash()
        raise Crashed

    # ---- the session ----

    def _connect(self) -> None:
        stream = connect(self, self.world.coordinator)
        if stream is None:
            self._again()
            return
        session = self._session = Session(stream, self._welcome, lambda news: None)
        stream.on_client_end = lambda error: self._lost(session, error)
        event, coordinator = self._hello(), self.world.coordinator
        stream.to_server(lambda: coordinator.hello(session, event))
        self.after(3.0, lambda: self._give_up(session))

    def _hello(self) -> Callable[[int], fe.Event]:
        place = RankPlace(Rank(0), f"host-{self.name}", DeviceUuid(f"gpu-{self.name}"))
        make = partial(
            fe.TrainerConnected,
            run_id=self.world.settings.run_id,
            model=POLICY,
            trainer_id=TrainerId(self.name),
            incarnation=self.incarnation,
            ranks=(place,),
            held_term=self.term,
            ended_incarnation=self._ended,
            takeover=self.takeover,
        )
        return lambda session: make(session)

    def _give_up(self, session: Session) -> None:
        if self._session is session and not session.greeted:
            session.stream.cancel()
            self._again()

    def _lost(self, session: Session, error: e.WeightplaneError) -> None:
        if self._session is not session:
            return
        if isinstance(error, e.StaleTerm):
            self.fence()
        self._again()

    def _again(self) -> None:
        self._session = None
        self.after(self.world.kernel.rng.uniform(*BACKOFF_SECONDS), self._connect)

    def _welcome(self, news: FleetNews, term: Term) -> None:
        session = self._session
        if session is None:
            return
        session.greeted = True
        first, self.term = not self.term, term
        self.takeover, self._ended = False, ""
        self._beat(session)
        if first:
            self.after(self.world.settings.push_every, self._push)

    def _beat(self, session: Session) -> None:
        if self._session is not session:
            return
        self._progress += 1
        term, step, progress, coordinator = self.term, self.step, self._progress, self.world.coordinator
        session.stream.to_server(lambda: coordinator.progress(session, term, step, "train", progress))
        self.after(self.world.settings.heartbeat, lambda: self._beat(session))

    # ---- pushes ----

    def _push(self) -> None:
        self.step += 1
        self.push = Push(self)
        self.push.begin()

    def push_over(self, *, committed: bool) -> None:
        self.pushed += committed
        wait = self.world.settings.push_every
        self.after(self.world.kernel.rng.uniform(0.5 * wait, 1.5 * wait), self._push)
