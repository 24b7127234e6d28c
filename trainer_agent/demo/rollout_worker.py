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
from functools import partial
from multiprocessing.connection import Connection
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from controlplane.core.sampling import SamplingSettings
from controlplane.core.versions import WeightVersion

if TYPE_CHECKING:
    from controlplane.rollout.client import RolloutClient
    from controlplane.rollout.sample import Sample

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


class WorkerProcess:
    """A process that answers the training process that holds it; it ends when that one does. A context manager.

    `serve(pipe, coordinator, *arguments)` is what it runs, with `answer_all`.

    Raises:
        RolloutFailed: no coordinator is named in the environment.
    """

    def __init__(self, serve: Callable[..., None], *arguments: Any) -> None:
        coordinator = os.environ.get(COORDINATOR_VARIABLE)
        if not coordinator:
            raise RolloutFailed(f"{COORDINATOR_VARIABLE} does not name the coordinator")
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        arguments = (serve, theirs, coordinator, *arguments)
        self._process = spawn.Process(target=_begin, args=arguments, name="rollouts", daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pipe.close()
        self._process.join(STOP_SECONDS)
        if self._process.is_alive():
            self._process.kill()

    def ask(self, request: Any) -> Any:
        """What the worker answers. Raises RolloutFailed: it could not, or is gone."""
        try:
            self._pipe.send(request)
            answer, failure = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise RolloutFailed(f"the rollout worker is gone: {error!r}") from error
        if failure:
            raise RolloutFailed(failure)
        return answer


class RolloutWorker(WorkerProcess):
    """Held by the one training process that asks for rollouts."""

    def __init__(self) -> None:
        super().__init__(_serve)

    def generate(self, asks: Sequence[Ask], min_version: WeightVersion) -> list[Rollout]:
        """One rollout for each ask, in order, each begun with `min_version` or a later one.

        Raises:
            RolloutFailed: a sample could not be had, or the worker is gone.
        """
        answer: list[Rollout] = self.ask((list(asks), min_version))
        return answer


# ---- the worker's side --------------------------------------------------------------------------


def _begin(serve: Callable[..., None], pipe: Connection, coordinator: str, *arguments: Any) -> None:
    from controlplane.processes import set_death_signal

    set_death_signal(signal.SIGKILL)
    # The terminal's Ctrl-C reaches the whole group; the trainer decides when this ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(pipe, coordinator, *arguments)


def _serve(pipe: Connection, coordinator: str) -> None:
    asyncio.run(_generate_for(pipe, coordinator))


async def _generate_for(pipe: Connection, coordinator: str) -> None:
    from controlplane.rollout.client import RolloutClient

    async with RolloutClient(coordinator) as client:

        async def answer(request: tuple[list[Ask], WeightVersion]) -> list[Rollout]:
            asks, min_version = request
            return await gather_rollouts(partial(roll_out, client), asks, min_version)

        await answer_all(pipe, answer)


async def answer_all(pipe: Connection, answer: Callable[[Any], Awaitable[Any]]) -> None:
    """Answer one request after the other until the trainer is gone. An error of the fleet's is an answer too."""
    from controlplane.core.errors import WeightplaneError

    while (request := await asyncio.to_thread(_receive, pipe)) is not None:
        try:
            pipe.send((await answer(request), ""))
        except (WeightplaneError, RolloutFailed) as error:
            pipe.send((None, f"{type(error).__name__}: {error}"))


async def roll_out(client: RolloutClient, ask: Ask, min_version: WeightVersion) -> Rollout:
    """Raises RolloutFailed: the engine ended the sample early."""
    sample = await client.generate(list(ask.prompt), ask.sampling, min_version=min_version)
    if sample.finish_reason == "abort":
        raise RolloutFailed(f"{sample.engine_id} ended a sample early: {sample.stop_reason}")
    return rollout_of(ask.prompt, sample)


def rollout_of(prompt: tuple[int, ...], sample: Sample) -> Rollout:
    versions = tuple(span.version.number for span in sample.spans)
    return Rollout(prompt, sample.tokens, sample.logprobs, versions, sample.engine_id)


def _receive(pipe: Connection) -> Any:
    """The next request; None when the trainer is gone."""
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return None


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
