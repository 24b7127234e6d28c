"""An engine agent's process and one incarnation in it, as far as its parts and the witness know them.

What an incarnation does with an event is `agent`'s to say; its parts (requests, work, link, streams) stand on this.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from controlplane.core import engine_effects as fx
from controlplane.core import engine_events as ee
from controlplane.core import errors as e
from controlplane.core.engine_core import EngineCore
from controlplane.core.engine_state import Held, Unset, Weights
from controlplane.core.engine_state import Life as LifeWord
from controlplane.core.versions import NO_TURN, DeviceTurn, EngineId, Term, UpdateId, WeightVersion
from controlplane.sim.disks import AgentDisk
from controlplane.sim.engine import INITIAL, ModelEngine, Staged
from controlplane.sim.kernel import Action, Kernel, Process
from controlplane.sim.seat import Seat
from controlplane.sim.settings import ModelSpec, digest_of


class AgentProcess(Process):
    """The process beside one engine, in which one life follows the other. Its disk outlives it."""

    def __init__(
        self, kernel: Kernel, spec: ModelSpec, seat: Seat, disk: AgentDisk, content: int | None = None
    ) -> None:
        """`content`: of a frozen model, the weights that it loads."""
        super().__init__(kernel, seat.name)
        self.spec = spec
        self.seat = seat
        self.disk = disk
        self.content = content
        self.lives = 0
        """On its disk too: lives have an order."""
        self.seen_term = Term(0)
        """Highest terms that this agent ever acted on; kept by the witness, over crashes."""
        self.seen_coordinator_term = Term(0)

    @property
    def engine_id(self) -> EngineId:
        return EngineId(self.name)


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


class Life(ABC):
    """One incarnation."""

    def __init__(self, agent: AgentProcess, core: EngineCore) -> None:
        self.agent = agent
        self.core = core
        self.engine = ModelEngine(INITIAL if agent.content is None else digest_of(agent.content))
        self.over = False
        self.staged: dict[int, Staged] = {}
        self.notes = Notes()
        self._outcomes: dict[UpdateId, list[Callable[[e.WeightplaneError | None], None]]] = {}

    def __str__(self) -> str:
        return self.core.state.incarnation

    @property
    def running(self) -> bool:
        """The engine started and is not gone."""
        return not self.over and self.core.state.life is LifeWord.RUNNING

    @property
    def open(self) -> bool:
        """Requests may enter."""
        return self.core.gate_open and self.engine.running

    def after(self, delay: float, action: Action) -> None:
        """Do it later, if this incarnation still lives then."""
        self.agent.after(delay, lambda: None if self.over else action())

    def drop(self, stream: int) -> None:
        staged = self.staged.pop(stream, None)
        if staged is not None:
            staged.closed = True

    def wait_for(self, update_id: UpdateId, told: Callable[[e.WeightplaneError | None], None]) -> None:
        """Tell the outcome of that update's install, also if it is over already."""
        state = self.core.state
        if state.installing:
            self._outcomes.setdefault(update_id, []).append(told)
        else:
            told(None if isinstance(state.weights, Held) else e.EngineDied(engine_id=self.agent.name, cause="over"))

    def decided(self, update_id: UpdateId, error: e.WeightplaneError | None) -> None:
        """Tell who waits for that install how it ended."""
        for told in self._outcomes.pop(update_id, []):
            told(error)

    @abstractmethod
    def apply(self, event: ee.Event) -> list[fx.Effect]:
        """Decide an event and carry out what is not its caller's own. Raises the core's refusals."""

    @abstractmethod
    def die(self, cause: str) -> None:
        """The engine's processes are gone: nothing of this incarnation is left, and another follows."""

    @abstractmethod
    def devices_given(self, owner: str) -> None:
        """The owner of a sleep wakes an engine that died in it, whole: a fresh one may take the devices."""
