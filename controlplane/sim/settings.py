"""How a simulated world is set up: models, sizes, times, and which decisions are under test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from controlplane.core.engine_core import EngineCore
from controlplane.core.fleet import FleetCore
from controlplane.core.layout import (
    MODEL_ONLY,
    DType,
    Expected,
    Layout,
    Target,
    TargetKind,
    TensorSpec,
    content_digest,
)
from controlplane.core.update_policy import Mode, UpdatePolicy
from controlplane.core.versions import ModelName, RunId

RUN = RunId("sim")
POLICY, CRITIC, REFERENCE = ModelName("policy"), ModelName("critic"), ModelName("reference")


@dataclass(frozen=True)
class ModelSpec:
    """A model of the run. `prefix` begins the names of its engines and trainers."""

    name: ModelName
    prefix: str
    layout: Layout
    frozen: bool = False

    @property
    def expected(self) -> Expected:
        draft = self.layout.draft
        return replace(_expected(self.layout.model), draft=None if draft is None else _expected(draft))


def _expected(layout: Layout) -> Expected:
    return Expected(
        shapes={t.name: t.shape for t in layout.tensors},
        dtypes={t.name: frozenset({t.dtype}) for t in layout.tensors},
    )


def _two_tensors(rows: int, targets: tuple[Target, ...] = MODEL_ONLY) -> Layout:
    return Layout((TensorSpec("a", DType.BF16, (4, 2)), TensorSpec("b", DType.BF16, (rows,), targets)))


BOTH = (Target(TargetKind.DRAFT), Target())
"""Of a tensor that is the draft model's too: its engines propose with what they serve, under one version."""


TENSORS = 2
"""Of every model; their layouts differ all the same."""
MODELS = {
    POLICY: ModelSpec(POLICY, "", _two_tensors(3)),
    CRITIC: ModelSpec(CRITIC, "c", _two_tensors(5, BOTH)),
    REFERENCE: ModelSpec(REFERENCE, "r", _two_tensors(7), frozen=True),
}
GROUPS = ("left", "right")
"""What the policy's engines are counted under where an update's policy counts groups."""

POLICIES = (
    UpdatePolicy(),
    UpdatePolicy(quorum=2),
    UpdatePolicy(Mode.ROLLING),
    UpdatePolicy(Mode.ROLLING, quorum=2),
    UpdatePolicy(quorum=1, min_engines={"left": 1, "right": 1}),
    UpdatePolicy(Mode.ROLLING, quorum=1, min_engines={"left": 1}),
)

CHANCES: Mapping[str, float] = {
    "break a stream": 0.25,
    "crash an agent": 0.12,
    "crash the coordinator": 0.08,
    "crash a trainer": 0.06,
    "pause a process": 0.15,
    "partition": 0.10,
    "kill an engine": 0.06,
    "take over": 0.05,
    "pause an engine": 0.10,
    "stall": 0.08,
    "sleep": 0.12,
    "drain": 0.08,
    "roll back": 0.08,
    "keep": 0.2,
    "lose a checkpoint": 0.05,
    "rogue": 0.30,
    "spans disagree": 0.02,
    "open twice": 0.15,
    "leave": 0.02,
    "fail the ledger": 0.02,
}
"""How likely each kind of trouble is at a time for trouble; each is judged by itself."""


@dataclass(frozen=True)
class SimSettings:
    """One world. Times are seconds."""

    engines: int = 7
    """Of all models together; see `fleet`."""
    counts: Mapping[ModelName, int] | None = None
    """Engines of each model instead; a model that is not named is not there."""
    clients: int = 2
    policy: UpdatePolicy | None = None
    """What an update needs; None: the seed chooses one of `POLICIES`."""
    units: bool | None = None
    """The policy's engines serve in pairs; None: the seed chooses."""
    lends: bool | None = None
    """Trainers share devices with engines, which sleep while they train; None: the seed chooses."""
    streaming: int | None = None
    """How many of each trained model's engines install updates as they come; None: the seed chooses."""
    checkpoints: bool = True
    """Trainers write what they pushed where engines can read it."""
    run_id: RunId = RUN
    lease_ttl: float = 3.0
    step_limit: float = 60.0
    ready_limit: float = 10.0
    go_limit: float = 6.0
    await_limit: float = 6.0
    heartbeat: float = 1.0
    tick: float = 0.5
    stream_idle: float = 8.0
    push_every: float = 0.5
    push_limit: float = 15.0
    trouble_every: float = 0.6
    """Mean time between times for trouble."""
    chances: Mapping[str, float] = field(default_factory=lambda: CHANCES)
    point_chance: float = 0.003
    """How likely a process dies or stops when it passes a fault point."""
    install_trouble: float = 0.08
    """How likely an install does not work."""
    sleep_trouble: float = 0.04
    """How likely an engine neither sleeps nor wakes, or does not start."""
    spans_trouble: float = 0.02
    """How likely a border in a sample shows that its tokens were counted wrongly."""
    settle_limit: float = 60.0
    """Once faults stop, everything is well within this time."""
    engine_core: type[EngineCore] = EngineCore
    fleet_core: type[FleetCore] = FleetCore

    def fleet(self) -> dict[ModelName, int]:
        """Engines of each model: most are the policy's."""
        if self.counts is not None:
            return dict(self.counts)
        critic = 0 if self.engines < 2 else max(1, self.engines * 2 // 7)
        reference = 0 if self.engines < 3 else max(1, self.engines // 7)
        counts = {POLICY: self.engines - critic - reference, CRITIC: critic, REFERENCE: reference}
        return {name: count for name, count in counts.items() if count}


def checksum(content: int, tensor: int) -> bytes:
    """Stands for XXH3_64 of that tensor's bytes in the weights `content`."""
    return (content * 16 + tensor).to_bytes(8, "big")


def digest_of(content: int) -> bytes:
    return content_digest([checksum(content, i) for i in range(TENSORS)])
