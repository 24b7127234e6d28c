"""A trainer agent's process: its lease, and pushes one after the other, as `trainer_agent` makes them.

A lease is asked for until it is granted; STALE_TERM ends the process for good (it was fenced). A push begins, brings
the version to every engine of the plan, sends commit frames only after GO, and believes the coordinator's decision
only. A push that failed is begun again with a new number. Where it shares devices with engines it borrows them
between pushes (`devices`), and what it pushed it may write down (`publisher`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from controlplane.core import errors as e
from controlplane.core import fleet_events as fe
from controlplane.core.plan import RankPlace
from controlplane.core.versions import DeviceUuid, Rank, Term, TrainerId
from controlplane.sim.coordinator import Coordinator
from controlplane.sim.coverage import TRANSPORTS
from controlplane.sim.devices import Devices
from controlplane.sim.kernel import connect
from controlplane.sim.leaseholder import Leaseholder
from controlplane.sim.publisher import Publisher
from controlplane.sim.push import Push
from controlplane.sim.roster import Roster
from controlplane.sim.sessions import Session
from controlplane.sim.surroundings import Surroundings

BACKOFF_SECONDS = (0.2, 0.8)
BORROW_CHANCE = 0.5
BESIDE_CHANCE = 0.4
"""Of trainings on borrowed devices: those after which it pushes before it gives them back."""


class Trainer(Leaseholder):
    """One trainer; `takeover` is whether its next hello insists."""

    def __init__(
        self, around: Surroundings, coordinator: Coordinator, team: Roster, name: str, *, takeover: bool = False
    ) -> None:
        super().__init__(around, coordinator, team, name)
        self.takeover = takeover
        self.pushed = 0
        """Pushes that the fleet committed."""
        self.push: Push | None = None
        self.devices = Devices(self, self.tell)
        self.publisher = Publisher(self)
        self._ended = ""
        self._session: Session | None = None
        self._progress = 0

    def boot(self) -> None:
        """Its ranks' earlier life is proven dead by its being here."""
        self._ended = self.incarnation if self.lives else ""
        self.lives += 1
        self.term, self.push, self._session, self._progress = Term(0), None, None, 0
        self.devices = Devices(self, self.tell)
        self.publisher = Publisher(self)
        self.broken = {}
        self._connect()

    # ---- the session ----

    def _connect(self) -> None:
        stream = connect(self, self.coordinator)
        if stream is None:
            self._again()
            return
        session = Session(stream, lambda news, term: self._welcome(session, term), lambda news: None)
        self._session = session
        stream.on_client_end = lambda error: self._lost(session, error)
        event, coordinator = self._hello(), self.coordinator
        stream.to_server(lambda: coordinator.hello(session, event))
        self.after(3.0, lambda: self._give_up(session))

    def _hello(self) -> Callable[[int], fe.Event]:
        make = partial(
            fe.TrainerConnected,
            run_id=self.around.settings.run_id,
            model=self.model,
            trainer_id=TrainerId(self.name),
            incarnation=self.incarnation,
            ranks=self._ranks(),
            held_term=self.term,
            ended_incarnation=self._ended,
            takeover=self.takeover,
            transports=TRANSPORTS,
        )
        return lambda session: make(session)

    def _ranks(self) -> tuple[RankPlace, ...]:
        """One on the devices of each engine that it shares them with; else one on devices of its own."""
        shared = [(f"host-{a.name}", d) for a in self.team.shared for d in a.seat.devices]
        places = shared or [(f"host-{self.name}", f"gpu-{self.name}")]
        return tuple(RankPlace(Rank(i), host, DeviceUuid(device)) for i, (host, device) in enumerate(places))

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
        self.after(self.around.kernel.rng.uniform(*BACKOFF_SECONDS), self._connect)

    def _welcome(self, session: Session, term: Term) -> None:
        if self._session is not session:
            return
        session.greeted = True
        first, self.term = not self.term, term
        self.takeover, self._ended = False, ""
        self._beat(session)
        if first:
            self.devices.give(lambda: None)  # what an earlier life took
            self.after(self.around.settings.push_every, self._push)

    def _beat(self, session: Session) -> None:
        if self._session is session:
            self._progress += 1
            self.tell()
            self.after(self.around.settings.heartbeat, lambda: self._beat(session))

    def tell(self) -> None:
        """Its status, as it is now."""
        session, coordinator = self._session, self.coordinator
        if session is not None and session.greeted:
            report = partial(
                fe.TrainerReported,
                term=self.term,
                step=self.step,
                phase="train",
                progress=self._progress,
                holds_devices=self.devices.held,
            )
            session.stream.to_server(lambda: coordinator.progress(session, report))

    # ---- pushes ----

    def _push(self) -> None:
        """A push needs its engines awake, whoever of its lives left them asleep."""
        if self.team.rests:
            self.after(self.around.settings.push_every, self._push)
            return
        self.step += 1
        self.devices.give(self._push_awake)

    def _push_beside_unless_it_rests(self) -> None:
        if self.team.rests:
            self._push()
        else:
            self.push_beside()

    def push_beside(self) -> None:
        """While it holds its devices: engines install, and are heard when it gives them."""
        self.step += 1
        self.push = Push(self, self.devices, self._push_over)
        self.devices.weights(self.push.begin)

    def _push_awake(self) -> None:
        if self.team.rests:
            self._push()
            return
        self.push = Push(self, self.devices, self._push_over)
        self.push.begin()

    def _push_over(self, push: Push, *, committed: bool) -> None:
        self.pushed += committed
        if committed and push.shipment is not None:
            self.publisher.write(push.shipment)
        wait = self.around.settings.push_every
        self.after(self.around.kernel.rng.uniform(0.5 * wait, 1.5 * wait), self._train)

    def _train(self) -> None:
        if self.team.shared and self.team.borrows and self.around.kernel.rng.random() < BORROW_CHANCE:
            beside = self.around.kernel.rng.random() < BESIDE_CHANCE
            self.devices.take(self._push_beside_unless_it_rests if beside else self._push)
        else:
            self._push()
