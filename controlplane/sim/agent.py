"""An engine agent's process: one `EngineCore` after the other, with what carries its events in and its effects out.

As `engine_agent` does: `Remember` is synced before anything after it, a stream that ended in any way is one
`StreamEnded`, an install goes on without its stream. The session is `link`'s, the engine itself `work`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from controlplane.core import engine_effects as fx
from controlplane.core import engine_events as ee
from controlplane.core import errors as e
from controlplane.core.engine_state import EngineState, Held, Hold, HoldKind, Poisoned, Residency, Unset, Weights
from controlplane.core.engine_state import Life as LifeWord
from controlplane.core.engine_streaming import STREAMING
from controlplane.core.plan import HOST_MEMORY, EnginePlace
from controlplane.core.versions import (
    NO_TURN,
    DeviceTurn,
    DeviceUuid,
    EngineId,
    Incarnation,
    Term,
    UpdateId,
    WeightVersion,
)
from controlplane.sim.coverage import TRANSPORTS
from controlplane.sim.disks import AgentDisk, Remembered
from controlplane.sim.engine import INITIAL, ModelEngine, Staged
from controlplane.sim.kernel import Action, Process, Stream
from controlplane.sim.link import Link
from controlplane.sim.requests import Requests
from controlplane.sim.settings import ModelSpec, digest_of
from controlplane.sim.update_stream import UpdateStream
from controlplane.sim.work import EngineWork

if TYPE_CHECKING:
    from controlplane.sim.world import World

START_SECONDS = (0.1, 1.5)
CAPABILITIES = frozenset({"staged", "sleep", "checkpoint"})
Command = Callable[["Life", Action], None]
"""Of a caller of Lifecycle: what to do with the life that it means, and what to do when that is done."""


@dataclass(frozen=True)
class Seat:
    """Where an engine is, in each of its lives."""

    name: str
    devices: tuple[str, ...]
    group: str = ""
    unit: str = ""
    unit_size: int = 0
    streaming: bool = False
    """Updates are installed as they come, where they come by host memory: no link reaches it."""

    @property
    def capabilities(self) -> frozenset[str]:
        return CAPABILITIES | {STREAMING} if self.streaming else CAPABILITIES

    def place(self, incarnation: Incarnation, life: int) -> EnginePlace:
        devices = tuple(DeviceUuid(d) for d in self.devices)
        return EnginePlace(
            EngineId(self.name),
            incarnation,
            self.name,
            f"host-{self.name}",
            devices,
            self.group,
            self.unit,
            self.unit_size,
            life,
            HOST_MEMORY if self.streaming else TRANSPORTS,
            likeness="simulated",
            streaming=self.streaming,
        )


class Agent(Process):
    """The process beside one engine. Its disk outlives it."""

    present: Life

    def __init__(self, world: World, spec: ModelSpec, seat: Seat, content: int | None = None) -> None:
        """`content`: of a frozen model, the weights that it loads."""
        super().__init__(world.kernel, seat.name)
        self.world = world
        self.spec = spec
        self.seat = seat
        self.content = content
        self.disk = AgentDisk(between=lambda: world.faults.point(self, "engine.before_sync"))
        self.lives = 0
        """On its disk too: lives have an order."""
        self.seen_term = Term(0)
        """Highest terms that this agent ever acted on; kept by the witness, over crashes."""
        self.seen_coordinator_term = Term(0)

    @property
    def engine_id(self) -> EngineId:
        return EngineId(self.name)

    def boot(self) -> None:
        """At once, on lent devices too: that an agent waits until they are given back is attacked in its own tests."""
        self.new_life()

    def new_life(self) -> None:
        """A fresh engine, in a new incarnation."""
        self.lives += 1
        self.present = Life(self, Incarnation(f"{self.name}/{self.lives}"))
        self.present.begin()

    def crash(self) -> None:
        self.present.over = True
        super().crash()

    def command(self, stream: Stream, incarnation: Incarnation, act: Command, answer: Action) -> None:
        """A Lifecycle call, meant for one incarnation."""
        try:
            self.present.check_meant(incarnation)
            act(self.present, lambda: stream.to_client(answer))
        except e.WeightplaneError as error:
            stream.refuse(error)


@dataclass
class Notes:
    """What the witness keeps of one incarnation."""

    welcomed: bool = False
    told: frozenset[WeightVersion] = frozenset()
    """The served set that it was told last."""
    highest: int = -1
    distrusted: bool = False
    """Its spans disagreed, and no full update came since."""
    held_before_install: Weights = field(default_factory=Unset)
    committed: UpdateId | None = None
    """The update whose commit frame was taken last."""
    excused: WeightVersion | None = None
    """A lower version than its highest that it may be given: it was unset, and the fleet serves it."""
    sleepers: set[str] = field(default_factory=set)
    """Who put it to sleep, and did not wake it."""
    unheard: set[str] = field(default_factory=set)
    """Those of them since the last wake was asked for."""
    turn: DeviceTurn = NO_TURN
    """The latest in which a trainer was heeded."""
    taken: dict[str, DeviceTurn] = field(default_factory=dict)
    """In which turn each trainer last put it to sleep."""


class Life:
    """One incarnation."""

    def __init__(self, agent: Agent, incarnation: Incarnation) -> None:
        self.agent = agent
        self.world = agent.world
        seen = agent.disk.synced
        state = EngineState(self.world.settings.run_id, agent.spec.name, EngineId(agent.name), incarnation)
        self.core = self.world.settings.engine_core(
            state, term=seen.term, coordinator_term=seen.coordinator_term, number=seen.number
        )
        self.engine = ModelEngine(INITIAL if agent.content is None else digest_of(agent.content))
        self.requests = Requests(self)
        self.link = Link(self)
        self.work = EngineWork(self)
        self.over = False
        self.waits = False
        """It died asleep: its devices are somebody else's, and nobody starts an engine on them."""
        self.staged: dict[int, Staged] = {}
        self.streams: dict[int, UpdateStream] = {}
        self.notes = Notes()
        self.streams_made = 0
        self._outcomes: dict[UpdateId, list[Callable[[e.WeightplaneError | None], None]]] = {}

    def __str__(self) -> str:
        return self.core.state.incarnation

    def describe(self) -> str:
        state = self.core.state
        holds = ", ".join(sorted(map(str, state.holds)))
        return f"{state.word(self.core.served)} {state.applied or ''} {holds}".strip()

    @property
    def running(self) -> bool:
        """The engine started and is not gone."""
        return not self.over and self.core.state.life is LifeWord.RUNNING

    @property
    def open(self) -> bool:
        """Requests may enter."""
        return self.core.gate_open and self.work.scheduler_runs

    def after(self, delay: float, action: Action) -> None:
        """Do it later, if this incarnation still lives then."""
        self.agent.after(delay, lambda: None if self.over else action())

    def begin(self) -> None:
        self.after(self.world.kernel.rng.uniform(*START_SECONDS), self._started)

    def _started(self) -> None:
        if self.world.faults.engine_fails():
            self.die("it did not start")
            return
        content = self.agent.content
        initial = None if content is None else digest_of(content)
        self.apply(ee.Started(self.agent.spec.expected, self.agent.seat.capabilities, initial))
        self.link.connect()

    def die(self, cause: str) -> None:
        """The engine's processes are gone: nothing of this incarnation is left, and another follows."""
        if self.over:
            return
        self.apply(ee.Died(cause))
        self.requests.end_all()
        self.link.end()
        self.over = True
        for update_stream in list(self.streams.values()):
            update_stream.stream.refuse(e.EngineDied(engine_id=self.agent.name, cause=cause))
        state = self.core.state
        self.waits = state.residency is not Residency.AWAKE and state.held_by(HoldKind.ASLEEP) is not None
        if not self.waits:
            self._replaced()

    def _replaced(self) -> None:
        self.agent.after(self.world.kernel.rng.uniform(0.1, 1.0), self.agent.new_life)

    def devices_given(self, owner: str) -> None:
        """The owner of a sleep wakes an engine that died in it, whole: a fresh one may take the devices."""
        if self.waits and owner == self.core.state.held_by(HoldKind.ASLEEP):
            self.waits = False
            self._replaced()

    # ---- events ----

    def apply(self, event: ee.Event) -> list[fx.Effect]:
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

    def _carry_out(self, effect: fx.Effect) -> None:
        match effect:
            case fx.Remember(term, coordinator_term, number):
                self.agent.disk.save(Remembered(term, coordinator_term, number))
            case fx.EndStream(stream, error):
                self.world.witness.refused(error)
                if stream in self.streams:
                    self.after(0.0, partial(self._end_stream, stream, error))
            case fx.DropStaged(stream):
                self.drop(stream)
            case fx.CutStreaming(stream, error):
                self.work.cut(stream, error)
            case fx.InstallDecided(update_id, error):
                for told in self._outcomes.pop(update_id, []):
                    told(error)
            case fx.Report():
                self._changed()
            case _:
                pass  # the stream or call that caused it answers

    def _end_stream(self, stream: int, error: e.WeightplaneError) -> None:
        if stream in self.streams:
            self.streams[stream].fail(error)

    def drop(self, stream: int) -> None:
        staged = self.staged.pop(stream, None)
        if staged is not None:
            staged.closed = True

    def _changed(self) -> None:
        self.work.look_at_gate()
        self.requests.look_again()
        self.link.send_soon()
        state = self.core.state
        if state.frozen and isinstance(state.weights, Poisoned):  # no update will ever heal it
            self.after(0.1, lambda: self.die("poisoned, and it takes no update"))

    # ---- calls ----

    def generate(self, stream: Stream, tokens: int, wanted: int | None) -> None:
        """A rollout client asks for tokens."""
        if not self.over:
            self.requests.generate(stream, tokens, wanted)

    def accept(self, stream: Stream) -> UpdateStream:
        """A writer connected."""
        self.streams_made += 1
        update_stream = self.streams[self.streams_made] = UpdateStream(self, stream, self.streams_made)
        return update_stream

    def wait_for(self, update_id: UpdateId, told: Callable[[e.WeightplaneError | None], None]) -> None:
        """Tell the outcome of that update's install, also if it is over already."""
        state = self.core.state
        if state.installing:
            self._outcomes.setdefault(update_id, []).append(told)
        else:
            told(None if isinstance(state.weights, Held) else e.EngineDied(engine_id=self.agent.name, cause="over"))

    def check_meant(self, incarnation: Incarnation) -> None:
        """Raises WrongIncarnation: a call for another life; PeerLost: there is none now."""
        state = self.core.state
        error: e.WeightplaneError | None = None
        if self.over and not self.waits:
            error = e.PeerLost(peer=state.engine_id, cause="its engine is between two lives")
        elif incarnation != state.incarnation:
            error = e.WrongIncarnation(engine_id=state.engine_id, expected=state.incarnation, got=incarnation)
        if error is not None:
            self.world.witness.refused(error)
            raise error

    def hold(self, kind: HoldKind, owner: str, *, present: bool) -> None:
        """PauseGeneration, Drain, or the end of one of them."""
        self.apply(ee.HoldChanged(Hold(kind, owner), present))

    def leave(self) -> None:
        """The agent ends on purpose."""
        self.apply(ee.Stopping())
        self.link.goodbye()
        self.after(0.3, self._left)

    def _left(self) -> None:
        self.apply(ee.Died("the agent ended"))
        self.agent.crash()
