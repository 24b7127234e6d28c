"""An engine agent's process: one `EngineCore` after the other, its session, its update streams, installs and gate.

Carries events in and effects out as `engine_agent` does: `Remember` is synced before anything after it, a stream that
ended in any way is one `StreamEnded`, an install goes on without its stream, the gate follows the state and never
moves during an install.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from controlplane.core import engine_events as ee
from controlplane.core import errors as e
from controlplane.core import fleet_events as fe
from controlplane.core.engine_state import EngineState, Held, Hold, HoldKind, Poisoned, Timings, Unset, Weights
from controlplane.core.engine_state import Life as LifeWord
from controlplane.core.plan import EnginePlace
from controlplane.core.versions import DeviceUuid, EngineId, Incarnation, Term, UpdateId
from controlplane.sim.coordinator import FleetNews, Session
from controlplane.sim.disks import AgentDisk, Remembered
from controlplane.sim.engine import InstallEnding, ModelEngine, Staged
from controlplane.sim.kernel import Action, Crashed, Process, Stream, connect
from controlplane.sim.requests import Requests
from controlplane.sim.settings import EXPECTED, POLICY
from controlplane.sim.update_stream import UpdateStream

if TYPE_CHECKING:
    from controlplane.sim.world import World

START_SECONDS = (0.1, 1.5)
RECONNECT_SECONDS = (0.1, 0.6)
WELCOME_SECONDS = 3.0
INSTALL_SECONDS = (0.02, 0.4)
FATAL = (e.WrongRun, e.IncompatibleNode, e.WrongIncarnation)
"""Refusals of a session that end the agent's process; its launcher starts it again."""


class Agent(Process):
    """The process beside one engine. Its disk outlives it."""

    present: Life

    def __init__(self, world: World, name: str, devices: tuple[str, ...] = ()) -> None:
        super().__init__(world.kernel, name)
        self.world = world
        self.devices = devices or (f"gpu-{name}",)
        self.disk = AgentDisk(between=lambda: world.faults.point(self, "engine.before_sync"))
        self.lives = 0
        self.seen_term = Term(0)
        """Highest terms that this agent ever acted on; kept by the witness, over crashes."""
        self.seen_coordinator_term = Term(0)

    @property
    def engine_id(self) -> EngineId:
        return EngineId(self.name)

    def boot(self) -> None:
        self.new_life()

    def new_life(self) -> None:
        """A fresh engine, in a new incarnation."""
        self.lives += 1
        self.present = Life(self, Incarnation(f"{self.name}/{self.lives}"))
        self.present.begin()

    def crash(self) -> None:
        self.present.over = True
        super().crash()


class Life:
    """One incarnation."""

    def __init__(self, agent: Agent, incarnation: Incarnation) -> None:
        self.agent = agent
        self.world = agent.world
        seen = agent.disk.synced
        state = EngineState(self.world.settings.run_id, POLICY, EngineId(agent.name), incarnation)
        self.core = self.world.settings.engine_core(
            state, term=seen.term, coordinator_term=seen.coordinator_term, number=seen.number
        )
        self.engine = ModelEngine()
        self.requests = Requests(self)
        self.over = False
        self.staged: dict[int, Staged] = {}
        self.streams: dict[int, UpdateStream] = {}
        self.scheduler_runs = True
        self._next_stream = 0
        self._installing = False
        self._outcomes: dict[UpdateId, list[Callable[[e.WeightplaneError | None], None]]] = {}
        self._session: Session | None = None
        self._sends = False
        # the witness's notes
        self.word = state.life.value
        self.welcomed = False
        self.highest = -1
        self.distrusted = False
        """Its spans disagreed, and no full update came since."""
        self.held_before_install: Weights = Unset()

    def __str__(self) -> str:
        return self.core.state.incarnation

    def describe(self) -> str:
        return f"{self.core.state.word(self.core.served)} {self.core.state.applied or ''}".strip()

    @property
    def running(self) -> bool:
        """The engine started and is not gone."""
        return not self.over and self.core.state.life is LifeWord.RUNNING

    def after(self, delay: float, action: Action) -> None:
        """Do it later, if this incarnation still lives then."""
        self.agent.after(delay, lambda: None if self.over else action())

    def begin(self) -> None:
        self.after(self.world.kernel.rng.uniform(*START_SECONDS), self._started)

    def _started(self) -> None:
        self.apply(ee.Started(EXPECTED))
        self._connect()

    def die(self, cause: str) -> None:
        """The engine's processes are gone: nothing of this incarnation is left, and another follows."""
        if self.over:
            return
        self.apply(ee.Died(cause))
        self.requests.end_all()
        self.over = True
        if self._session is not None:
            self._session.stream.cancel()
        for update_stream in list(self.streams.values()):
            update_stream.stream.refuse(e.EngineDied(engine_id=self.agent.name, cause=cause))
        self.agent.after(self.world.kernel.rng.uniform(0.1, 1.0), self.agent.new_life)

    # ---- events ----

    def apply(self, event: ee.Event) -> list[ee.Effect]:
        """Decide an event and carry out what is not its caller's own. Raises the core's refusals."""
        before = self.core.state
        try:
            effects = self.core.handle(event, self.world.kernel.now)
        except e.WeightplaneError as error:
            self.world.witness.refused(error)
            self.world.coverage.engine_events[type(event).__name__] += 1
            self.world.witness.check(self.core.state == before, "refusals", f"{error.reason} changed {self}")
            raise
        self.world.witness.engine(self, event, before, effects)
        for effect in effects:
            self._carry_out(effect)
        self.world.witness.acted(self, event)
        return effects

    def _carry_out(self, effect: ee.Effect) -> None:
        match effect:
            case ee.Remember(term, coordinator_term, number):
                self.agent.disk.save(Remembered(term, coordinator_term, number))
            case ee.EndStream(stream, error):
                self.world.witness.refused(error)
                if stream in self.streams:
                    self.after(0.0, partial(self._end_stream, stream, error))
            case ee.DropStaged(stream):
                self.drop(stream)
            case ee.InstallDecided(update_id, error):
                for told in self._outcomes.pop(update_id, []):
                    told(error)
            case ee.Report():
                self._changed()
            case _:
                pass  # the stream that caused it answers

    def _end_stream(self, stream: int, error: e.WeightplaneError) -> None:
        if stream in self.streams:
            self.streams[stream].fail(error)

    def drop(self, stream: int) -> None:
        staged = self.staged.pop(stream, None)
        if staged is not None:
            staged.closed = True

    def _changed(self) -> None:
        if isinstance(self.core.state.weights, Poisoned) and not self._installing:
            self.requests.abort_all()
        self.after(0.0, self._follow_gate)
        self.requests.look_again()
        if not self._sends:
            self._sends = True
            self.after(self.world.kernel.rng.uniform(0.0, 0.02), self._send_status)

    # ---- the session ----

    def _connect(self) -> None:
        stream = connect(self.agent, self.world.coordinator)
        if stream is None:
            self.after(self.world.kernel.rng.uniform(*RECONNECT_SECONDS), self._connect)
            return
        session = self._session = Session(stream, self._welcome, self._follow)
        stream.on_client_end = lambda error: self._lost(session, error)
        hello, coordinator = self._hello(), self.world.coordinator
        stream.to_server(lambda: coordinator.hello(session, hello))
        self.after(WELCOME_SECONDS, lambda: self._give_up(session))

    def _hello(self) -> Callable[[int], fe.Event]:
        core, gate = self.core, self.core.gate_open
        state, term, coordinator_term, number = core.state, core.term, core.coordinator_term, core.number
        devices = tuple(DeviceUuid(d) for d in self.agent.devices)
        place = EnginePlace(state.engine_id, state.incarnation, self.agent.name, f"host-{self.agent.name}", devices)
        return lambda session: fe.EngineConnected(
            session, place, state, gate, ("staged",), term, coordinator_term, number
        )

    def _give_up(self, session: Session) -> None:
        """No welcome came in time."""
        if self._session is session and not session.greeted:
            session.stream.cancel()
            self._again()

    def _lost(self, session: Session, error: e.WeightplaneError) -> None:
        if self.over or self._session is not session:
            return
        if isinstance(error, FATAL):
            self.agent.crash()
            raise Crashed
        self._again()

    def _again(self) -> None:
        self._session = None
        self.after(self.world.kernel.rng.uniform(*RECONNECT_SECONDS), self._connect)

    def _welcome(self, news: FleetNews, term: Term) -> None:
        session = self._session
        if self.over or session is None:
            return
        session.greeted = True
        self._follow(news)
        self._beat(session)

    def _follow(self, news: FleetNews) -> None:
        """INV-7: terms come before any update. An old coordinator's words end its session."""
        model = news.model(POLICY)
        session = self._session
        if self.over or session is None or model is None:
            return
        try:
            self.apply(ee.FleetChanged(news.coordinator_term, model.term, frozenset(model.served)))
        except e.StaleTerm:
            session.stream.cancel()
            self._again()

    def _beat(self, session: Session) -> None:
        if self._session is session:
            self._send_status()
            self.after(self.world.settings.heartbeat, lambda: self._beat(session))

    def _send_status(self) -> None:
        """The newest state only; those between were nobody's business."""
        self._sends = False
        session = self._session
        if session is None or not session.greeted:
            return
        state, gate, coordinator = self.core.state, self.core.gate_open, self.world.coordinator
        session.stream.to_server(lambda: coordinator.report(session, state, gate))
        self.world.faults.point(self.agent, "engine.after_report")

    def leave(self) -> None:
        """The agent ends on purpose."""
        self.apply(ee.Stopping())
        session, coordinator = self._session, self.world.coordinator
        if session is not None:
            session.stream.to_server(lambda: coordinator.goodbye(session))
        self.after(0.3, self._left)

    def _left(self) -> None:
        self.agent.crash()
        raise Crashed

    # ---- calls ----

    def generate(self, stream: Stream, tokens: int, wanted: int | None) -> None:
        """A rollout client asks for tokens."""
        if not self.over:
            self.requests.generate(stream, tokens, wanted)

    def accept(self, stream: Stream) -> UpdateStream:
        """A writer connected."""
        self._next_stream += 1
        update_stream = self.streams[self._next_stream] = UpdateStream(self, stream, self._next_stream)
        return update_stream

    def wait_for(self, update_id: UpdateId, told: Callable[[e.WeightplaneError | None], None]) -> None:
        """Tell the outcome of that update's install, also if it is over already."""
        state = self.core.state
        if state.installing:
            self._outcomes.setdefault(update_id, []).append(told)
        else:
            told(None if isinstance(state.weights, Held) else e.EngineDied(engine_id=self.agent.name, cause="over"))

    # ---- installs ----

    def start_install(self, effect: ee.StartInstall) -> None:
        """From here on the agent owns the update."""
        self._installing = True
        ending = self.world.faults.install_ending(self.agent.name)
        self.after(self._some(0.1), lambda: self._quiesce(effect.stream, effect.update, ending))

    def _some(self, part: float) -> float:
        return part * self.world.kernel.rng.uniform(*INSTALL_SECONDS)

    def _quiesce(self, stream: int, update: ee.Update, ending: InstallEnding) -> None:
        self.world.faults.point(self.agent, "engine.before_install")
        self._stop_scheduler()
        self.after(self._some(0.5), lambda: self._install(stream, update, ending))

    def _install(self, stream: int, update: ee.Update, ending: InstallEnding) -> None:
        name, version = self.agent.name, str(update.version)
        if ending is InstallEnding.NOT_QUIET:
            touched = self.core.state.weights != update.held_before
            self._failed(stream, e.DeadlineExceeded("quiesce", "the last tokens", 1.0), touched=touched)
            return
        self.apply(ee.Quiesced())
        if ending is InstallEnding.UNTOUCHED:
            self._failed(stream, e.InstallFailed(name, version, False, "no byte could be read"), touched=False)
            return
        self.world.faults.point(self.agent, "engine.mid_install")
        self.engine.install_begins()
        self.after(self._some(1.0), lambda: self._loaded(stream, update, ending))

    def _loaded(self, stream: int, update: ee.Update, ending: InstallEnding) -> None:
        name, version = self.agent.name, str(update.version)
        if ending is InstallEnding.TOUCHED:
            self._failed(stream, e.InstallFailed(name, version, True, "a worker failed"), touched=True)
        elif ending in (InstallEnding.TIMED_OUT, InstallEnding.DIED):
            lost: e.WeightplaneError = e.InstallTimedOut(name, version, 1.0)
            if ending is InstallEnding.DIED:
                lost = e.EngineDied(engine_id=name, cause="killed in mid-install")
            self._failed(stream, lost, touched=True)
            self.die(str(lost))
        else:
            staged = self.staged[stream]
            self.world.witness.check(not staged.closed, "INV-12", f"{self} reads what was dropped")
            self.engine.install_worked(staged.digest())
            self.after(self._some(0.3), lambda: self._spoke(stream, update, ending))

    def _spoke(self, stream: int, update: ee.Update, ending: InstallEnding) -> None:
        self.world.faults.point(self.agent, "engine.after_install")
        if ending is InstallEnding.CANARY:
            error = e.CanaryFailed(self.agent.name, str(update.version), "a logprob is not finite")
            self._failed(stream, error, touched=True)
            return
        self.apply(ee.CanaryPassed(Timings()))
        self._install_over(stream)

    def _failed(self, stream: int, error: e.WeightplaneError, *, touched: bool) -> None:
        self.world.witness.refused(error)
        self.apply(ee.InstallEnded(error, touched))
        if touched:
            self.requests.abort_all()
        self._install_over(stream)

    def _install_over(self, stream: int) -> None:
        self._installing = False
        self.drop(stream)
        self.after(0.0, self._follow_gate)

    # ---- the gate ----

    @property
    def open(self) -> bool:
        """Requests may enter."""
        return self.core.gate_open and self.scheduler_runs

    def _follow_gate(self) -> None:
        """Level-triggered: the scheduler runs exactly while the gate is open."""
        if self._installing:
            return
        applied = self.core.state.applied
        if self.core.gate_open and not self.scheduler_runs and applied is not None:
            self.requests.release(applied)
            self.engine.running = self.scheduler_runs = True
            self.requests.look_again()
        elif not self.core.gate_open and self.scheduler_runs and self.core.state.life is LifeWord.RUNNING:
            self._stop_scheduler()

    def _stop_scheduler(self) -> None:
        if self.scheduler_runs:
            self.engine.running = self.scheduler_runs = False
            self.requests.draw_border()
            if self.world.faults.spans_disagree():
                self.apply(ee.SpansDisagreed("our account of a request is not the engine's"))

    def hold(self, owner: str, incarnation: Incarnation, *, present: bool) -> None:
        """An operator's pause or resume, meant for one incarnation."""
        state = self.core.state
        if incarnation != state.incarnation:
            error = e.WrongIncarnation(engine_id=state.engine_id, expected=state.incarnation, got=incarnation)
            self.world.witness.refused(error)
            return
        self.apply(ee.HoldChanged(Hold(HoldKind.OPERATOR, owner), present))
