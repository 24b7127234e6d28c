"""How a simulated world is set up: sizes, times, and which decisions are under test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from controlplane.core.engine_core import EngineCore
from controlplane.core.fleet import FleetCore
from controlplane.core.layout import DType, Expected, Layout, TensorSpec, content_digest
from controlplane.core.update_transaction import Mode, UpdatePolicy
from controlplane.core.versions import ModelName, RunId

RUN = RunId("sim")
POLICY = ModelName("policy")

POLICIES = (
    UpdatePolicy(),
    UpdatePolicy(quorum=2),
    UpdatePolicy(Mode.ROLLING),
    UpdatePolicy(Mode.ROLLING, quorum=2),
)

LAYOUT = Layout((TensorSpec("a", DType.BF16, (4, 2)), TensorSpec("b", DType.BF16, (3,))))
EXPECTED = Expected(
    shapes={t.name: t.shape for t in LAYOUT.tensors},
    dtypes={t.name: frozenset({t.dtype}) for t in LAYOUT.tensors},
)

CHANCES: Mapping[str, float] = {
    "break a stream": 0.25,
    "crash an agent": 0.12,
    "crash the coordinator": 0.08,
    "crash a trainer": 0.06,
    "pause a process": 0.15,
    "partition": 0.10,
    "kill an engine": 0.06,
    "take over": 0.06,
    "operator": 0.10,
    "rogue": 0.30,
    "spans disagree": 0.02,
    "open twice": 0.15,
    "leave": 0.02,
}
"""How likely each kind of trouble is at a time for trouble; each is judged by itself."""


@dataclass(frozen=True)
class SimSettings:
    """One world. Times are seconds."""

    engines: int = 4
    clients: int = 2
    policy: UpdatePolicy | None = None
    """What an update needs; None: the seed chooses one of `POLICIES`."""
    run_id: RunId = RUN
    lease_ttl: float = 3.0
    step_limit: float = 60.0
    ready_limit: float = 10.0
    go_limit: float = 6.0
    heartbeat: float = 1.0
    tick: float = 0.5
    stream_idle: float = 8.0
    push_every: float = 0.5
    push_limit: float = 15.0
    trouble_every: float = 0.6
    """Mean time between times for trouble."""
    chances: Mapping[str, float] = field(default_factory=lambda: CHANCES)
    point_chance: float = 0.004
    """How likely a process dies or stops when it passes a fault point."""
    install_trouble: float = 0.08
    """How likely an install does not work."""
    spans_trouble: float = 0.02
    """How likely a border in a sample shows that its tokens were counted wrongly."""
    settle_limit: float = 60.0
    """Once faults stop, everything is well within this time."""
    engine_core: type[EngineCore] = EngineCore
    fleet_core: type[FleetCore] = FleetCore


def checksum(content: int, tensor: int) -> bytes:
    """Stands for XXH3_64 of that tensor's bytes in the weights `content`."""
    return (content * 16 + tensor).to_bytes(8, "big")


def digest_of(content: int) -> bytes:
    return content_digest([checksum(content, i) for i in range(len(LAYOUT.tensors))])
