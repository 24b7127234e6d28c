"""Bounded calls into one engine core.

Promises that no call outlives its limit or its engine: vLLM never answers a call that was in flight when the
core died, so each is raced against the core's death. Never uses collective_rpc's own timeout: its late reply
would be taken for the next call's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from controlplane.core.errors import DeadlineExceeded, EngineDied
from engine_agent.vllm.engine_log import EngineLog, with_log

T = TypeVar("T")

DEATH_POLL_SECONDS = 0.1
"""vLLM's own monitor notices a death within this, and sets a flag that has to be polled."""


class Calls(Protocol):
    """What an install needs of an engine core, in this process or behind a server."""

    @property
    def engine_id(self) -> str: ...
    @property
    def llm(self) -> Any:
        """vLLM's calls under their own names, each awaitable."""
        ...

    async def ask(self, call: Awaitable[T], what: str, limit_seconds: float) -> T:
        """The call's result. Raises EngineDied, DeadlineExceeded, or what the call raised."""
        ...

    async def collect(self, method: str, limit_seconds: float) -> list[dict[str, Any]]:
        """One answer of each worker, in rank order."""
        ...

    async def tell(self, method: str, limit_seconds: float) -> None:
        """Every worker does it."""
        ...

    def init_request(self, told: dict[str, Any]) -> Any:
        """As `llm.init_weight_transfer_engine` takes it."""
        ...

    def update_request(self, step: dict[str, Any]) -> Any:
        """As `llm.update_weights` takes it."""
        ...

    def answered(self, error: Exception) -> bool:
        """The engine lives, and this is its answer to a call that failed in it."""
        ...


class Core:
    """An AsyncLLM and its life. Made on the event loop that uses it."""

    def __init__(self, llm: Any, engine_id: str, log: EngineLog, on_death: Callable[[EngineDied], None]) -> None:
        self.llm = llm
        self.engine_id = engine_id
        self._log = log
        self._on_death = on_death
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._watch = asyncio.create_task(self._watch_for_death(), name=f"weightplane-watch-{engine_id}")

    @property
    def death(self) -> EngineDied | None:
        """A new error that says why the core is gone, or None while it lives."""
        return EngineDied(self.engine_id, self._death.result()) if self._death.done() else None

    def raise_if_dead(self) -> None:
        death = self.death
        if death is not None:
            raise death

    async def ask(self, call: Awaitable[T], what: str, limit_seconds: float) -> T:
        """The call's result. Raises EngineDied, DeadlineExceeded, or what vLLM raised."""
        task = asyncio.ensure_future(call)
        try:
            either: set[asyncio.Future[Any]] = {task, self._death}
            await asyncio.wait(either, timeout=limit_seconds, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return self._result(task)
        finally:
            task.cancel()  # an answer that comes later is dropped by vLLM
        self.raise_if_dead()
        raise DeadlineExceeded(what, f"the engine core of {self.engine_id}", limit_seconds)

    @property
    def cores(self) -> int:
        """Engine cores: the data parallel size."""
        return int(self.llm.vllm_config.parallel_config.data_parallel_size)

    async def collect(self, method: str, limit_seconds: float) -> list[dict[str, Any]]:
        """One answer of each worker of every core, in rank order; fewer answers than workers is a death.

        vLLM's own collective_rpc asks every core and hands on what the first one says.
        """
        call = self.llm.engine_core.call_utility_all_async("collective_rpc", method, None, (), None)
        by_core: list[list[dict[str, Any]]] = await self.ask(call, method, limit_seconds)
        answers = [answer for core in by_core for answer in core]
        world_size = self.cores * self.llm.vllm_config.parallel_config.world_size
        if sorted(a["rank"] for a in answers) != list(range(world_size)):
            raise EngineDied(self.engine_id, f"{method}: {len(answers)} of {world_size} workers answered")
        return sorted(answers, key=lambda a: int(a["rank"]))

    async def tell(self, method: str, limit_seconds: float, **arguments: Any) -> None:
        """Every worker of every core does it. Raises EngineDied, DeadlineExceeded, or what vLLM raised."""
        call = self.llm.engine_core.call_utility_all_async("collective_rpc", method, None, (), arguments)
        await self.ask(call, method, limit_seconds)

    def init_request(self, told: dict[str, Any]) -> Any:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        return WeightTransferInitRequest(told)

    def update_request(self, step: dict[str, Any]) -> Any:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        return WeightTransferUpdateRequest(step)

    def answered(self, error: Exception) -> bool:
        return type(error) is Exception  # vLLM's answer to a failed call is a bare one

    def died(self, cause: str, *, explain: bool = True) -> EngineDied:
        """Note the death, once, and tell those who wait. `explain` adds the engine's last log lines."""
        first = not self._death.done()
        if first:
            self._death.set_result(with_log(cause, self._log) if explain else cause)
        error = EngineDied(self.engine_id, self._death.result())
        if first:
            self._on_death(error)
        return error

    def close(self) -> None:
        self._watch.cancel()

    def _result(self, task: asyncio.Future[T]) -> T:
        try:
            return task.result()
        except Exception as e:
            if is_death(e):
                raise self.died(str(e)) from e
            raise

    async def _watch_for_death(self) -> None:
        while not self.llm.errored:  # noqa: ASYNC110 - a flag set by a thread of vLLM's
            await asyncio.sleep(DEATH_POLL_SECONDS)
        self.died("vLLM reports that its engine core is dead")


def is_death(error: BaseException) -> bool:
    """Whether vLLM says with this that its engine core is gone."""
    from vllm.v1.engine.exceptions import EngineDeadError

    return isinstance(error, EngineDeadError)
