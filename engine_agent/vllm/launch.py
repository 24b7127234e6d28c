"""Starts vLLM's AsyncLLM without blocking the event loop, and ends its processes for good.

Promises that a start ends by its deadline, or when it shows no sign of life, with nothing left running after a failure;
that its errors carry the engine's last errors, and the agent's log its last lines. Construction runs in a thread of its
own: it takes 16 to 34 seconds, and heartbeats go on meanwhile. vLLM starts its background tasks at the first call, so
they end up on the agent's loop.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from functools import partial
from importlib.metadata import entry_points
from typing import Any, TypeVar

import psutil
import structlog

from controlplane.core.errors import EngineDied, UnsupportedByEngine
from engine_agent.lineage import tie_coordinator
from engine_agent.threads import in_thread
from engine_agent.vllm import environment
from engine_agent.vllm.connectors import check_connector
from engine_agent.vllm.engine_log import EngineLog, with_log
from engine_agent.vllm.plugin import ENTRY_POINT_GROUP, ENTRY_POINT_NAME
from engine_agent.vllm.processes import KILL_WAIT_SECONDS, descendants, kill
from engine_agent.vllm.settings import Nodes, VllmSettings, engine_arguments
from engine_agent.vllm.starting import Signs, signs_of, started

logger = structlog.get_logger(__name__)

T = TypeVar("T")

WAKE_SECONDS = 0.5

_late: set[asyncio.Future[None]] = set()
"""Engines that came after their start was given up, being ended."""


async def launch(
    settings: VllmSettings,
    engine_id: str,
    log: EngineLog,
    note: Callable[[set[psutil.Process]], None],
    nodes: Nodes | None = None,
) -> Any:
    """A started AsyncLLM. Raises EngineDied, UnsupportedByEngine; nothing of the attempt runs then. `note` gets its
    processes meanwhile."""
    if not entry_points(group=ENTRY_POINT_GROUP, name=ENTRY_POINT_NAME):
        raise EngineDied(engine_id, "the weightplane package is not installed: vLLM would not find its plugin")
    before, given_up = descendants(), threading.Event()

    def look() -> Signs:
        processes = descendants() - before
        note(processes)
        return signs_of(log.size, processes)

    construct = partial(_construct, settings, engine_id, log, given_up, nodes)
    attempt = asyncio.ensure_future(in_thread(construct, name="weightplane-vllm-start"))
    try:
        cause = await started(attempt, look, settings.start_idle_seconds, settings.start_timeout_seconds)
        if cause is None:
            return attempt.result()
    except (asyncio.CancelledError, UnsupportedByEngine):
        given_up.set()
        await _abandon(attempt, before)
        raise
    except Exception as e:  # vLLM raises whatever its configuration raised
        cause = f"{type(e).__name__}: {e}"
    given_up.set()
    await _abandon(attempt, before)
    logger.error("engine_not_started", engine_id=engine_id, last_log_lines=log.last_lines())
    raise EngineDied(engine_id, with_log(cause, log))


async def end(llm: Any, limit_seconds: float) -> None:
    """vLLM's own way out: SIGTERM to the core, SIGKILL when the limit passes."""
    ending = asyncio.ensure_future(in_thread(partial(llm.shutdown, timeout=limit_seconds), name="weightplane-vllm-end"))
    while not ending.done():
        # A signal that comes just before the core's main thread blocks is seen only when something wakes it.
        wake = asyncio.ensure_future(llm.is_paused())
        await asyncio.wait({ending}, timeout=WAKE_SECONDS)
        wake.cancel()
        await asyncio.gather(wake, return_exceptions=True)
    ending.result()


def _construct(
    settings: VllmSettings, engine_id: str, log: EngineLog, given_up: threading.Event, nodes: Nodes | None
) -> Any:
    gpu = environment.gpu_present()
    environment.apply(environment.engine_environment(settings, gpu=gpu, log_config=log.config, base=os.environ))
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    if settings.data_parallel_size > 1:
        tie_coordinator()
    if given_up.is_set():  # the imports alone took too long
        raise TimeoutError("the start was given up")
    arguments = AsyncEngineArgs(**engine_arguments(settings, gpu=gpu, nodes=nodes))
    check_connector(engine_id, arguments.kv_transfer_config)
    return AsyncLLM.from_engine_args(arguments)


async def _abandon(attempt: asyncio.Future[Any], before: set[psutil.Process]) -> None:
    """End a start that failed or came too late; a constructor that waits for a killed core then returns."""
    deadline = asyncio.get_running_loop().time() + KILL_WAIT_SECONDS
    while True:
        started = descendants() - before
        await in_thread(partial(kill, started), name="weightplane-vllm-kill")
        if attempt.done() or asyncio.get_running_loop().time() > deadline:
            break
        await asyncio.wait({attempt}, timeout=WAKE_SECONDS)
    if attempt.done():
        await _discard(attempt)
    else:  # it hangs before any process was started; should it ever come to that, it is ended then
        attempt.add_done_callback(lambda late: _late.add(asyncio.ensure_future(_discard(late))))


async def _discard(attempt: asyncio.Future[Any]) -> None:
    if not attempt.cancelled() and attempt.exception() is None:
        await end(attempt.result(), KILL_WAIT_SECONDS)
