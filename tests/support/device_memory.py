"""One device's memory, shared by an in-memory engine and a rank of the test: who has what in it, and whether it fits.

Put `AccountingEngine` in the place of the agent's in-memory engine, and let the test's rank take and free what it
says that it needs; whoever takes more than there is fails as on a GPU.
"""

from __future__ import annotations

import threading
from typing import Any, ClassVar

from controlplane.core.errors import EngineDied
from engine_agent.memory.engine import MemoryEngine


class DeviceMemory:
    """What lies in it, by name; every state that it was in."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.states: list[frozenset[str]] = []
        self._used: dict[str, int] = {}
        self._lock = threading.Lock()

    def set(self, **sizes: int) -> None:
        """Take, or free with 0. Raises MemoryError."""
        with self._lock:
            used = {k: v for k, v in {**self._used, **sizes}.items() if v}
            if sum(used.values()) > self.capacity:
                raise MemoryError(f"{used} in {self.capacity} bytes")
            self._used = used
            self.states.append(frozenset(used))


class AccountingEngine(MemoryEngine):
    """Dies of what does not fit."""

    device: ClassVar[DeviceMemory]

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._account()

    async def sleep(self, level: int) -> None:
        await super().sleep(level)
        self._account()

    async def wake(self, *, kv_cache: bool) -> None:
        await super().wake(kv_cache=kv_cache)
        self._account()

    def _account(self) -> None:
        try:
            self.device.set(**{n: self._resident.get(n, 0) for n in ("weights", "kv")})
        except MemoryError as error:
            self._death = str(error)
            raise EngineDied(self._engine_id, self._death) from error
