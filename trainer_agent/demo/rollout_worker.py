"""Rollouts for a training process, from a process of their own: no gRPC may live beside Megatron's forks.

`RolloutWorker` is the training side: it spawns the worker and talks to it over a pipe. The worker owns the
`RolloutClient`; it ends when its parent does, however the parent ends. A sample that an engine cut short is asked for
again; what can't be sampled within the attempts is an error, never a shorter batch.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType

from controlplane.core.sampling import SamplingSettings
from controlplane.core.versions import WeightVersion

COORDINATOR_VARIABLE = "WEIGHTPLANE_COORDINATOR"
ATTEMPTS = 5
"""For one sample: an engine may die in the middle of it, and a new sample is as good."""
IN_FLIGHT = 64
"""Samples asked for at once; more would only wait in the engines."""
STOP_SECONDS = 10.0


class RolloutFailed(RuntimeError):
    """Samples could not be had; the text is the last cause."""


@dataclass(frozen=True, slots=True)
class Ask:
    prompt: tuple[int, ...]
    sampling: SamplingSettings


@dataclass(frozen=True, slots=True)
class Rollout:
    """A whole sample, with the numbers of the versions that made it and the engine."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    engine: str


Generate = Callable[[Ask, WeightVersion], Awaitable[Rollout]]


class RolloutWorker:
    """Held by the one training process that asks for rollouts. A context manager.

    Raises:
        RolloutFailed: no coordinator is named in the environment.
    """

    def __init__(self) -> None:
        coordinator = os.environ.get(COORDINATOR_VARIABLE)
        if not coordinator:
            raise RolloutFailed(f"{COORDINATOR_VARIABLE} does not name the coordinator")
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs, coordinator), name="rollouts", daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> RolloutWorker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pipe.close()
        self._process.join(STOP_SECONDS)
        if self._process.is_alive():
            self._process.kill()

    def generate(self, asks: Sequence[Ask], min_version: WeightVersion) -> list[Rollout]:
        """One rollout for each ask, in order, each begun with `min_version` or a later one.

        Raises:
            RolloutFailed: a sample could not be had, or the worker is gone.
        """
        try:
            self._pipe.send((list(asks), min_version))
            answer: list[Rollout] | str = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise RolloutFailed(f"the rollout worker is gone: {error!r}") from error
        if isinstance(answer, str):
            raise RolloutFailed(answer)
        return answer


# ---- the worker's side --------------------------------------------------------------------------


def _serve(pipe: Connection, coordinator: str) -> None:
    from controlplane.processes import set_death_signal

    set_death_signal(signal.SIGKILL)
    # The terminal's Ctrl-C reaches the whole group; the trainer decides when this ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_answer(pipe, coordinator))


async def _answer(pipe: Connection, coordinator: str) -> None:
    from controlplane.core.errors import WeightplaneError
    from controlplane.rollout.client import RolloutClient

    async with RolloutClient(coordinator) as client:

        async def once(ask: Ask, min_version: WeightVersion) -> Rollout:
            sample = await client.generate(list(ask.prompt), ask.sampling, min_version=min_version)
            if sample.finish_reason == "abort":
                raise RolloutFailed(f"{sample.engine_id} ended a sample early: {sample.stop_reason}")
            versions = tuple(span.version.number for span in sample.spans)
            return Rollout(ask.prompt, tuple(sample.tokens), tuple(sample.logprobs), versions, str(sample.engine_id))

        while (request := await asyncio.to_thread(_receive, pipe)) is not None:
            asks, min_version = request
            try:
                answer: list[Rollout] | str = await gather_rollouts(once, asks, min_version)
            except (WeightplaneError, RolloutFailed) as error:
                answer = f"{type(error).__name__}: {error}"
            pipe.send(answer)


def _receive(pipe: Connection) -> tuple[list[Ask], WeightVersion] | None:
    """The next request; None when the trainer is gone."""
    try:
        request: tuple[list[Ask], WeightVersion] = pipe.recv()
    except (EOFError, OSError):
        return None
    return request


async def gather_rollouts(once: Generate, asks: Sequence[Ask], min_version: WeightVersion) -> list[Rollout]:
    """All rollouts, at most `IN_FLIGHT` at a time, each with `ATTEMPTS`. Raises the last cause of the first failure."""
    room = asyncio.Semaphore(IN_FLIGHT)

    async def one(ask: Ask) -> Rollout:
        async with room:
            return await _with_attempts(once, ask, min_version)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(ask)) for ask in asks]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def _with_attempts(once: Generate, ask: Ask, min_version: WeightVersion) -> Rollout:
    from controlplane.core.errors import WeightplaneError

    for attempt in range(1, ATTEMPTS + 1):
        try:
            return await once(ask, min_version)
        except (WeightplaneError, RolloutFailed):
            if attempt == ATTEMPTS:
                raise
    raise AssertionError("unreachable")
