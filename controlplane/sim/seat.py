"""Where an engine is, and what it can do there: the same in each of its lives."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.core.engine_streaming import STREAMING
from controlplane.core.plan import HOST_MEMORY, EnginePlace
from controlplane.core.versions import DeviceUuid, EngineId, Incarnation
from controlplane.sim.coverage import TRANSPORTS

CAPABILITIES = frozenset({"staged", "sleep", "checkpoint"})


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
