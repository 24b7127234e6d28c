"""The trainer agent as a process that local rank 0 spawned: `python -m trainer_agent.agent.sidecar`. Not for people.

It ends when its ranks have gone, also when they were killed: it watches its parent by process id, and then still
tells the other ranks, aborts, says goodbye and sweeps.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import sys
from pathlib import Path

import structlog

from controlplane.allocator import keep_freed_memory
from controlplane.config import ConfigError, load
from controlplane.core.errors import StaleTerm, TlsFailed
from controlplane.exit_codes import ExitCode
from controlplane.processes import open_process
from controlplane.rpc.logs import configure_logging
from controlplane.rpc.ports import PortUnavailable
from trainer_agent.agent.daemon import TrainerAgent
from trainer_agent.agent.settings import TrainerSettings
from trainer_agent.directories import sweep

log = structlog.get_logger(__name__)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="trainer_agent.agent.sidecar")
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--socket", required=True, type=Path)
    parser.add_argument("--parent", required=True, type=int)
    parser.add_argument("--run-id", default="")
    parser.add_argument("--config", type=Path)
    given = parser.parse_args(arguments)
    configure_logging("trainer")
    keep_freed_memory()
    try:
        settings = _settings(given)
    except ConfigError as error:
        log.error("config_refused", cause=str(error))
        return ExitCode.CONFIG
    return asyncio.run(_serve(settings, given.socket, given.parent))


def _settings(given: argparse.Namespace) -> TrainerSettings:
    """Of the file, with what its ranks said on top: they state the model. Raises ConfigError."""
    said = {"coordinator": given.coordinator, "model": ""} | ({"run_id": given.run_id} if given.run_id else {})
    return load(TrainerSettings, given.config, said)


async def _serve(settings: TrainerSettings, socket_path: Path, parent: int) -> int:
    sweep()
    agent = TrainerAgent(settings, socket_path)
    try:
        await agent.start()
        await _until_over(agent, parent)
    except PortUnavailable as error:
        log.error("port_unavailable", cause=str(error))
        return ExitCode.PORT_IN_USE
    except (ConfigError, TlsFailed) as error:
        log.error("config_refused", cause=str(error))
        return ExitCode.CONFIG
    finally:
        await agent.close()
        shutil.rmtree(socket_path.parent, ignore_errors=True)
    return ExitCode.FENCED if isinstance(agent.refusal, StaleTerm) else ExitCode.OK


async def _until_over(agent: TrainerAgent, parent: int) -> None:
    """Its ranks came and went; or its parent died and no rank is there; or it was told to stop."""
    loop = asyncio.get_running_loop()
    stop, orphaned = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    death = open_process(parent)
    if death is None:
        return
    loop.add_reader(death, orphaned.set)
    await _any_of(stop, agent.ended, orphaned)
    loop.remove_reader(death)
    os.close(death)
    if orphaned.is_set() and agent.pids:
        # The other ranks are told, and leave.
        await _any_of(stop, agent.ended)


async def _any_of(*events: asyncio.Event) -> None:
    waits = [asyncio.create_task(e.wait()) for e in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


if __name__ == "__main__":
    sys.exit(main())
