"""The port: all that is asked of a device's runtime. What is behind it is called from ranks and from engines' workers.

Promises nothing about when memory may be written again: that is the protocol's matter (INV-12). Bytes are seen as a
flat tensor of bytes, in place. Whoever exports frees only what nobody has open, whoever opened closes.
"""

from __future__ import annotations

from typing import Protocol

import torch


class DeviceMemoryError(Exception):
    """The runtime refused: its message, in one line."""


class Exported(Protocol):
    """An allocation of this process."""

    handle: bytes
    """The driver's name of it: of any use only to other processes of this host."""
    memory: torch.Tensor
    """Its bytes."""

    def free(self) -> None:
        """Idempotent. What others have open of it is undefined from here on."""
        ...


class Opened(Protocol):
    """An allocation of another process."""

    memory: torch.Tensor
    """Its bytes."""

    def close(self) -> None:
        """Idempotent."""
        ...


class DeviceMemory(Protocol):
    """One runtime. Every method may raise DeviceMemoryError."""

    def why_not(self) -> str:
        """Why this process can export none; empty: it can. Touches no device."""
        ...

    def export(self, byte_count: int, device_uuid: str) -> Exported:
        """A plain allocation of the driver's own: none of a caching allocator's, none that a memory saver moves."""
        ...

    def open(self, handle: bytes, byte_count: int, device_uuid: str) -> Opened:
        """The other process's allocation; refused in the process that exported it."""
        ...

    def synchronise(self, device_uuid: str) -> None:
        """Return when everything that this process asked of the device is done."""
        ...
