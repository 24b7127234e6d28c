"""Runs a trainer on this node: the agent, its ranks under torch's launcher, and their restarts, until the end.

Promises: a fenced trainer is never started again; other failures are, `max_restarts` times; at the end, however it
comes, no rank, no segment and no socket is left.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
from pathlib import Path

import structlog

from controlplane.allocator import keep_freed_memory
from controlplane.config import ConfigError
from controlplane.core.errors import StaleTerm, TlsFailed
from controlplane.exit_codes import ExitCode
from controlplane.rpc.ports import PortUnavailable
from controlplane.supervision import Supervisor, Turns
from trainer_agent import wire
from trainer_agent.agent.daemon import TrainerAgent
from trainer_agent.agent.launch import Launcher
from trainer_agent.agent.output import DIRECTORY_VARIABLE, RankOutput
from trainer_agent.agent.settings import TrainerSettings
from trainer_agent.directories import private_directory, sweep

log = structlog.get_logger(__name__)

FENCE_SECONDS = 10.0
"""How long fenced ranks may take to end by themselves before they are told to."""


async def run_trainer(settings: TrainerSettings, command: list[str]) -> int:
    """Start ranks that run `command` (a Python script and its arguments) and see them through.

    Returns:
        The exit code: OK, FENCED, LEASE_HELD, CONFIG, PORT_IN_USE, RANKS_FAILED or INTERRUPTED. SIGINT, SIGTERM and
        Lifecycle.Shutdown end it in order.
    """
    keep_freed_memory()
    sweep()
    directory = private_directory()
    output = RankOutput(directory, settings.nproc_per_node)
    stop = _stop_event()
    agent = TrainerAgent(settings, directory / "ranks.sock", stop=stop, output=output)
    supervisor = Supervisor()
    feeding = asyncio.create_task(supervisor.feed(Turns()))
    try:
        await agent.start()
        supervisor.ready(f"trainer {settings.trainer_id}, {settings.nproc_per_node} ranks")
        return int(await _lives(settings, command, agent, directory, stop))
    except PortUnavailable as error:
        log.error("port_unavailable", cause=str(error))
        return ExitCode.PORT_IN_USE
    except (ConfigError, TlsFailed) as error:
        log.error("config_refused", cause=str(error))
        return ExitCode.CONFIG
    finally:
        supervisor.stopping()
        await agent.close()
        feeding.cancel()
        output.close()
        shutil.rmtree(directory, ignore_errors=True)


async def _lives(
    settings: TrainerSettings, command: list[str], agent: TrainerAgent, directory: Path, stop: asyncio.Event
) -> ExitCode:
    for life in range(settings.max_restarts + 1):
        environment = {
            wire.RANK_SOCKET_VARIABLE: str(directory / "ranks.sock"),
            wire.COORDINATOR_VARIABLE: settings.coordinator,
            wire.RUN_ID_VARIABLE: settings.run_id,
            wire.RESTART_COUNT_VARIABLE: str(life),
            DIRECTORY_VARIABLE: str(directory),
        }
        launcher = await Launcher.start(settings.nproc_per_node, command, environment, settings.stop_seconds)
        log.info("ranks_started", life=life, count=settings.nproc_per_node)
        try:
            code = await _one_life(launcher, agent, stop)
        finally:
            await launcher.stop()
        log.info("ranks_ended", life=life, code=code.name)
        if code is not ExitCode.RANKS_FAILED:
            return code
    return ExitCode.RANKS_FAILED


async def _one_life(launcher: Launcher, agent: TrainerAgent, stop: asyncio.Event) -> ExitCode:
    """Until the ranks end, the trainer is fenced, or somebody says stop."""
    ended = asyncio.create_task(launcher.wait())
    stopped = asyncio.create_task(stop.wait())
    refused = asyncio.create_task(agent.refused_event.wait())
    try:
        await asyncio.wait({ended, stopped, refused}, return_when=asyncio.FIRST_COMPLETED)
        if refused.done() and not stopped.done():
            await asyncio.wait({ended, stopped}, timeout=FENCE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        return _verdict(agent, ended.result() if ended.done() else None, stopped.done())
    finally:
        for task in (ended, stopped, refused):
            task.cancel()


def _verdict(agent: TrainerAgent, code: int | None, stopped: bool) -> ExitCode:
    if isinstance(agent.refusal, StaleTerm) or code == ExitCode.FENCED:
        return ExitCode.FENCED
    if stopped:
        return ExitCode.INTERRUPTED
    if code == ExitCode.OK:
        return ExitCode.OK
    if agent.refusal is not None:
        return ExitCode.CONFIG
    return ExitCode.LEASE_HELD if agent.lease_held_by_another else ExitCode.RANKS_FAILED


def _stop_event() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    return stop
