"""An engine agent that Hypothesis moves: its core, its disk, what it said, and what really lies in its engine."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import strategies as st

from controlplane.core import engine_effects as fx
from controlplane.core import engine_events as ee
from controlplane.core import errors as e
from controlplane.core.engine_core import DROPS_WEIGHTS, SLEEP, EngineCore
from controlplane.core.engine_state import EngineState
from controlplane.core.layout import DType, Expected, Layout, TensorSpec, content_digest
from controlplane.core.versions import EngineId, Incarnation, ModelName, RunId, Term

RUN, POLICY = RunId("run"), ModelName("policy")
LAYOUT = Layout((TensorSpec("w", DType.F32, (4,)),))
EXPECTED = Expected(shapes={"w": (4,)}, dtypes={"w": frozenset({DType.F32})})
TTL = 10.0
NAMES = st.sampled_from(["e0", "e1", "e2"])
MIXTURE = b"mixture"
DROPPED = b"dropped"
DEVICES = {"e0": "gpu-t", "e1": "gpu-e1", "e2": "gpu-e2"}
"""The trainer's device is e0's too."""


def checksum(number: int) -> bytes:
    return number.to_bytes(8, "big")


def digest_of(content: int) -> bytes:
    return content_digest([checksum(content)])


@dataclass
class Agent:
    """One engine agent: its disk outlives its lives."""

    name: str
    life: int = 0
    disk: fx.Remember = field(default_factory=lambda: fx.Remember(Term(0), Term(0), 0))
    seen_term: int = 0
    session: int | None = None
    reports: deque[tuple[EngineState, bool]] = field(default_factory=deque)
    """On their way to the coordinator."""
    streams: int = 0
    open_stream: int | None = None
    content: bytes = b"initial"
    quiesced: bool = False
    highest: int = -1
    asleep: bool = False
    """Its memory is somebody else's, whatever anybody says."""
    waking: fx.StartWake | None = None
    core: EngineCore = field(init=False)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.life += 1
        state = EngineState(RUN, POLICY, EngineId(self.name), Incarnation(f"{self.name}/{self.life}"))
        self.core = EngineCore(
            state, term=self.disk.term, coordinator_term=self.disk.coordinator_term, number=self.disk.number
        )
        self.session, self.open_stream, self.quiesced, self.content, self.highest = None, None, False, b"initial", -1
        self.asleep, self.waking = False, None
        self.reports.clear()
        self.handle(ee.Started(EXPECTED, frozenset({SLEEP})))

    def handle(self, event: ee.Event) -> list[fx.Effect]:
        before = self.core.state
        try:
            effects = self.core.handle(event, 0.0)
        except e.Refused:
            assert self.core.state == before
            raise
        for effect in effects:
            if isinstance(effect, fx.Remember):
                self.disk = effect
            elif isinstance(effect, fx.StartSleep):
                self.asleep = True
                self.content = DROPPED if effect.level == DROPS_WEIGHTS else self.content
            elif isinstance(effect, fx.StartWake):
                self.waking = effect
            elif isinstance(effect, fx.Report) and self.session is not None:
                self.reports.append((self.core.state, self.core.gate_open))
        return effects
