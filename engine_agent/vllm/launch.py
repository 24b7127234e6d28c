"""Starts vLLM's AsyncLLM without blocking the event loop, and ends its processes for good.

Promises that a start ends by its deadline, one way or the other, with nothing left running after a failure,
and that its errors carry the engine's last log lines. Construction runs in a thread of its own: it takes 16 to
34 seconds, and heartbeats go on meanwhile. vLLM starts its background tasks at the first call, so they end up
on the agent's loop.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
import threading
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

import psutil

from controlplane.core.errors import EngineDied
from engine_agent.threads import in_thread
from engine_agent.vllm import environment
from engine_agent.vllm.lineage import tie_coordinator
from engine_agent.vllm.plugin import ENTRY_POINT_GROUP, ENTRY_POINT_NAME
from engine_agent.vllm.processes import KILL_WAIT_SECONDS, descendants, kill
from engine_agent.vllm.settings import Nodes, VllmSettings, engine_arguments

T = TypeVar("T")

TAIL_LINES = 12
TAIL_LINE_CHARACTERS = 300
"""Twelve such lines fit into the metadata of a gRPC error."""
TAIL_LIMIT_BYTES = 64 * 1024
WAKE_SECONDS = 0.5

_late: set[asyncio.Future[None]] = set()
"""Engines that came after their start was given up, being ended."""


class EngineLog:
    """Errors of one engine's processes, in a file, so that a failure can be explained."""

    def __init__(self, level: str) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="weightplane-vllm-"))
        self.config = self._directory / "logging.json"
        self._file = self._directory / "engine.log"
        self.config.write_text(json.dumps(self._dict_config(level)))

    def tail(self) -> str:
        """The last messages and exceptions, oldest first, without their stacks; empty if there are none."""
        try:
            with self._file.open("rb") as f:
                f.seek(max(0, self._file.stat().st_size - TAIL_LIMIT_BYTES))
                text = f.read().decode(errors="replace")
        except FileNotFoundError:
            return ""
        lines = [line[:TAIL_LINE_CHARACTERS] for line in text.splitlines() if not _of_a_stack(line)]
        return "\n".join(lines[-TAIL_LINES:])

    def remove(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)

    def _dict_config(self, level: str) -> dict[str, Any]:
        terse = {"format": "%(vllm_process_name)s: %(message)s"}
        usual = {
            "class": "vllm.logging_utils.NewLineFormatter",
            "datefmt": "%m-%d %H:%M:%S",
            "format": "(%(vllm_process_name)s pid=%(process)d) %(levelname)s %(asctime)s [%(fileinfo)s:%(lineno)d] "
            "%(message)s",
        }
        stream = {"class": "logging.StreamHandler", "formatter": "usual", "stream": "ext://sys.stderr"}
        file = {
            "class": "logging.FileHandler",
            "formatter": "terse",
            "filename": str(self._file),
            "level": "ERROR",
            "delay": True,
        }
        return {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"terse": terse, "usual": usual},
            "handlers": {"stream": stream, "file": file},
            "loggers": {"vllm": {"handlers": ["stream", "file"], "level": level, "propagate": False}},
        }


def _of_a_stack(line: str) -> bool:
    return line.startswith((" ", "Traceback (")) or not line


async def launch(settings: VllmSettings, engine_id: str, log: EngineLog, nodes: Nodes | None = None) -> Any:
    """A started AsyncLLM. Raises EngineDied; nothing of the attempt runs then."""
    if not entry_points(group=ENTRY_POINT_GROUP, name=ENTRY_POINT_NAME):
        raise EngineDied(engine_id, "the weightplane package is not installed: vLLM would not find its plugin")
    before, given_up = descendants(), threading.Event()
    construct = partial(_construct, settings, log, given_up, nodes)
    attempt = asyncio.ensure_future(in_thread(construct, name="weightplane-vllm-start"))
    try:
        done, _ = await asyncio.wait({attempt}, timeout=settings.start_timeout_seconds)
        if done:
            return attempt.result()
        cause = f"no engine core within {settings.start_timeout_seconds} s"
    except asyncio.CancelledError:
        given_up.set()
        await _abandon(attempt, before)
        raise
    except Exception as e:  # vLLM raises whatever its configuration raised
        cause = f"{type(e).__name__}: {e}"
    given_up.set()
    await _abandon(attempt, before)
    raise EngineDied(engine_id, with_log(cause, log))


def with_log(cause: str, log: EngineLog) -> str:
    tail = log.tail()
    return f"{cause}\nthe engine's last errors:\n{tail}" if tail else cause


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


def _construct(settings: VllmSettings, log: EngineLog, given_up: threading.Event, nodes: Nodes | None) -> Any:
    gpu = environment.gpu_present()
    environment.apply(environment.engine_environment(settings, gpu=gpu, log_config=log.config, base=os.environ))
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    if settings.data_parallel_size > 1:
        tie_coordinator()
    if given_up.is_set():  # the imports alone took too long
        raise TimeoutError("the start was given up")
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(settings, gpu=gpu, nodes=nodes)))


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
