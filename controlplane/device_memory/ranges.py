"""Where bytes lie in exported device memory: what senders, agents and workers tell each other. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ExportedRange:
    """A range of an exported allocation, as it travels; see CudaIpcRange in layout.proto."""

    device_uuid: str
    export_id: str
    """Names this allocation: one that takes its place has another id, whatever the driver's handle is."""
    handle: bytes
    buffer_bytes: int
    """Of the whole allocation."""
    offset: int
    byte_count: int
    torch_version: str

    @property
    def inside(self) -> bool:
        return 0 <= self.offset <= self.offset + self.byte_count <= self.buffer_bytes

    def told(self) -> dict[str, Any]:
        """As an agent tells it to its workers: plain values."""
        return asdict(self) | {"handle": self.handle.hex()}

    @classmethod
    def heard(cls, told: Mapping[str, Any]) -> ExportedRange:
        return cls(**{**told, "handle": bytes.fromhex(told["handle"])})


@dataclass(frozen=True, slots=True)
class ExportedProbe:
    """What a worker opens, and the bytes that it finds there if that went well."""

    range: ExportedRange
    checksum: bytes
    """XXH3_64."""

    def told(self) -> dict[str, Any]:
        """The same."""
        return {"range": self.range.told(), "checksum": self.checksum.hex()}

    @classmethod
    def heard(cls, told: Mapping[str, Any]) -> ExportedProbe:
        return cls(ExportedRange.heard(told["range"]), bytes.fromhex(told["checksum"]))
