"""What people order of one engine: found through the coordinator, told to its agent, and watched until it came about.

Each order names the life of the engine that the coordinator knows now, so that it never reaches another one's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from controlplane.cli.ask import asking, get_fleet
from controlplane.cli.bar import bar
from controlplane.cli.ending import CommandFailed
from controlplane.cli.fleet_table import version_text
from controlplane.core.errors import EngineNotReady, StaleVersion, UpdateInProgress
from controlplane.core.names import trainer_owner
from controlplane.exit_codes import ExitCode
from controlplane.rpc.codec import seconds_to_proto
from controlplane.rpc.errors import from_rpc_error
from weightplane.v1 import engine_pb2, lifecycle_pb2, lifecycle_pb2_grpc, operator_pb2, operator_pb2_grpc, pause_pb2

LOOK_SECONDS = 0.2
"""Between two looks at what is waited for, and between two tries of what an update is in the way of."""
MODES = {mode: pause_pb2.PauseMode.Value(f"PAUSE_MODE_{mode.upper()}") for mode in ("keep", "abort", "wait")}


@dataclass(frozen=True, slots=True)
class Target:
    """Whose engine is meant, and how long its answers may take."""

    coordinator: str
    engine_id: str
    timeout: float


@dataclass(frozen=True, slots=True)
class Found:
    """An engine's agent, and what names its present life there."""

    lifecycle: Any
    fleet: operator_pb2.FleetView
    view: operator_pb2.EngineView

    @property
    def run_id(self) -> str:
        return self.fleet.run_id

    @property
    def life(self) -> dict[str, Any]:
        return {"run_id": self.run_id, "engine": self.view.status.engine}

    @property
    def sleepers(self) -> list[str]:
        """Whoever put it to sleep."""
        return [h.owner for h in self.view.status.holds if h.kind == engine_pb2.HOLD_KIND_ASLEEP]


async def drain(target: Target, owner: str, wait: float) -> str:
    async with _agent(target) as found:
        request = lifecycle_pb2.DrainRequest(**found.life, owner=owner)
        status = (await found.lifecycle.Drain(request, timeout=target.timeout)).status
        began = time.monotonic()
        with bar(f"draining {target.engine_id}", wait) as waited:
            while status.live_requests and time.monotonic() - began < wait:
                waited(time.monotonic() - began, f"{status.live_requests} requests are in it")
                await asyncio.sleep(LOOK_SECONDS)
                asked = lifecycle_pb2.GetStatusRequest(run_id=found.run_id)
                status = (await found.lifecycle.GetStatus(asked, timeout=target.timeout)).status
    if wait and status.live_requests:
        raise _not_yet(f"{target.engine_id}: {status.live_requests} requests are in it still", wait)
    return f"{target.engine_id} takes nothing new; {status.live_requests} requests are in it"


async def pause(target: Target, owner: str, mode: str, wait: float) -> str:
    async with _agent(target) as found:
        request = lifecycle_pb2.PauseGenerationRequest(**found.life, owner=owner, mode=MODES[mode])
        if mode == "wait":
            request.wait_limit.CopyFrom(seconds_to_proto(wait))
        paused = await found.lifecycle.PauseGeneration(request, timeout=target.timeout + wait)
    return f"{target.engine_id} makes no tokens; {paused.aborted_requests} requests were ended"


async def resume(target: Target, owner: str, wait: float) -> str:
    async with _agent(target) as found:
        request = lifecycle_pb2.ResumeGenerationRequest(**found.life, owner=owner)
        status = (await found.lifecycle.ResumeGeneration(request, timeout=target.timeout)).status
    if wait:
        await _watch(target, wait, lambda e: e is not None and e.routable, "it is not routable")
        return f"{target.engine_id} is routable"
    return f"{target.engine_id}: {_gate(status)}"


async def wake(target: Target, owner: str, wait: float, *, anyway: bool) -> str:
    async with _agent(target) as found:
        owners = [name for name in found.sleepers if owner in ("", name)]
        if owner and not owners:
            others = ", ".join(found.sleepers) or "nobody"
            raise CommandFailed(ExitCode.FAILED, f"{target.engine_id} sleeps for {others}, not for {owner}")
        for name in owners:
            _check_gone(found.fleet, target.engine_id, name, anyway=anyway)
        for name in owners:
            request = lifecycle_pb2.WakeUpRequest(**found.life, owner=name, kv_cache=True)
            try:
                await found.lifecycle.WakeUp(request, timeout=target.timeout + wait)
            except grpc.aio.AioRpcError as error:
                if not isinstance(
                    from_rpc_error(error), EngineNotReady
                ):  # it is dead: a fresh engine starts by this word
                    raise
    if wait:
        await _watch(target, wait, lambda e: e is not None and e.routable, "it is not routable")
        return f"{target.engine_id} is routable"
    return (
        f"{target.engine_id} sleeps for nobody"
        if not owners
        else f"{target.engine_id}: {', '.join(owners)} has it no more"
    )


def _check_gone(fleet: operator_pb2.FleetView, engine_id: str, owner: str, *, anyway: bool) -> None:
    """Raises CommandFailed: the trainer has the engine's devices, and may live."""
    for trainer in fleet.trainers:
        lives = trainer.connected or trainer.lease_expire_time.ToSeconds() > time.time()
        if trainer_owner(trainer.trainer_id) == owner and trainer.status.holds_devices and lives and not anyway:
            problem = (
                f"{engine_id}: trainer {trainer.trainer_id} (term {trainer.term}) has its devices, and its lease stands"
            )
            raise CommandFailed(ExitCode.FAILED, f"{problem}: end it first, or say --anyway")


async def shutdown(target: Target, reason: str, wait: float) -> str:
    async with _agent(target) as found:
        life = found.view.status.engine.incarnation
        request = lifecycle_pb2.ShutdownRequest(run_id=found.run_id, incarnation=life, reason=reason)
        await found.lifecycle.Shutdown(request, timeout=target.timeout)
    if wait:
        await _watch(target, wait, lambda e: e is None or e.status.engine.incarnation != life, "it has not left")
        return f"{target.engine_id} left"
    return f"{target.engine_id} ends"


async def keep(target: Target, number: int, model: str, wait: float) -> str:
    request = operator_pb2.KeepVersionRequest(engine_id=target.engine_id, number=number, model=model)
    try:
        kept = await _told(target, lambda operator: operator.KeepVersion(request, timeout=target.timeout))
    except StaleVersion as error:
        what = "it goes back only in another life: shut it down, keep it (with --model), and start it again"
        raise CommandFailed(ExitCode.FAILED, f"{error.reason}: {error}; {what}") from error
    version = version_text(kept.version)
    if wait:
        await _watch(target, wait, lambda e: e is not None and e.routable, f"it does not serve {version}")
        return f"{target.engine_id} stays at version {version}, and serves it"
    return f"{target.engine_id} stays at version {version}"


async def release(target: Target, wait: float) -> str:
    request = operator_pb2.ReleaseVersionRequest(engine_id=target.engine_id)
    await _told(target, lambda operator: operator.ReleaseVersion(request, timeout=target.timeout))
    if wait:
        await _watch(target, wait, lambda e: e is not None and e.routable, "it does not serve what the fleet serves")
        return f"{target.engine_id} goes with the fleet, and serves"
    return f"{target.engine_id} goes with the fleet"


# ---- how ----


@asynccontextmanager
async def _agent(target: Target) -> AsyncIterator[Found]:
    """Raises CommandFailed: it is not there, or not heard."""
    fleet = await get_fleet(target.coordinator, target.timeout)
    view = _engine(fleet, target.engine_id)
    if view is None:
        known = ", ".join(e.status.engine.engine_id for e in fleet.engines) or "none"
        raise CommandFailed(ExitCode.FAILED, f"no engine {target.engine_id} is known; known are: {known}")
    if not view.known:
        raise CommandFailed(ExitCode.UNREACHABLE, f"the coordinator does not hear {target.engine_id}: it is UNKNOWN")
    async with asking(view.endpoint) as channel:
        yield Found(lifecycle_pb2_grpc.LifecycleStub(channel), fleet, view)


def _engine(fleet: operator_pb2.FleetView, engine_id: str) -> operator_pb2.EngineView | None:
    return next((e for e in fleet.engines if e.status.engine.engine_id == engine_id), None)


async def _told(target: Target, call: Callable[[Any], Awaitable[Any]]) -> Any:
    """The coordinator's answer; asked again, within the timeout, while an update is on its way to the engine."""
    until = time.monotonic() + target.timeout
    async with asking(target.coordinator) as channel:
        operator = operator_pb2_grpc.OperatorStub(channel)
        while True:
            try:
                return await call(operator)
            except grpc.aio.AioRpcError as error:
                passes = isinstance(from_rpc_error(error), UpdateInProgress)
                if not passes or time.monotonic() > until:
                    raise
            await asyncio.sleep(LOOK_SECONDS)


async def _watch(
    target: Target,
    wait: float,
    came_about: Callable[[operator_pb2.EngineView | None], bool],
    what: str,
) -> None:
    """Look until it came about. Raises CommandFailed after `wait` seconds, with what the engine is meanwhile."""
    began = time.monotonic()
    with bar(f"waiting for {target.engine_id}", wait) as waited:
        while True:
            engine = _engine(await get_fleet(target.coordinator, target.timeout), target.engine_id)
            if came_about(engine):
                return
            word = "not connected" if engine is None or not engine.known else engine.status.word
            if time.monotonic() - began > wait:
                raise _not_yet(f"{target.engine_id}: {what}; it is {word}", wait)
            waited(time.monotonic() - began, f"it is {word}")
            await asyncio.sleep(LOOK_SECONDS)


def _not_yet(what: str, wait: float) -> CommandFailed:
    return CommandFailed(ExitCode.FAILED, f"{what} after {wait:g} s")


def _gate(status: engine_pb2.EngineStatus) -> str:
    if status.gate_open:
        return "its gate is open"
    holds = ", ".join(f"{engine_pb2.HoldKind.Name(h.kind)[10:].lower()} ({h.owner})" for h in status.holds)
    return f"its gate is shut: {holds or status.word}"
