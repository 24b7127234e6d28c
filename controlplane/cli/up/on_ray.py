"""The processes of a fleet file on a Ray cluster: placed by placement groups, each held by an actor.

Promises: what must be on one node is placed together or not at all (STRICT_PACK), and keeps its room while one of its
processes is started again; when a node is gone its groups move, and their processes are started anew where they went.
Ray carries no weights, no versions and no decisions: the contract stays gRPC, so an engine that comes back on another
node is caught up before it is routable, as any other (INV-10). Refuses to let Ray restart an actor by itself: whether
a process is started again is told by its exit code, which Ray does not know (INV-7).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from controlplane.cli.crew import how_it_ended
from controlplane.cli.ending import CommandFailed
from controlplane.cli.up.places import Ended, Process
from controlplane.cli.up.ray_process import Begun, RayProcess
from controlplane.exit_codes import ExitCode
from controlplane.fleet_file import Bundle, Together
from controlplane.rpc.addresses import split_address

STOP_SECONDS = {"trainer": 35.0, "engine": 30.0}
"""For an orderly end on the node, in this order of kinds: ranks end in order, engines drain."""
ANSWER_SECONDS = 15.0
"""For an actor's answer, beside what it waits for."""
ROOM_SECONDS = 20.0
"""After so long without room it is said, and said again: a cluster may get a node at any time."""
DEVICES_SECONDS = 120.0
"""How long ranks wait for the engines whose devices they share to say which these are."""
METHODS_AT_ONCE = 4
"""Of an actor: `wait` takes one for good."""

KNOCK_SECONDS = 5.0
NODE_DIGITS = 12
"""Of Ray's name of a node, shown."""


@dataclass(frozen=True, slots=True)
class _Room:
    """One process's part of a placement group."""

    group: Any
    index: int
    together: Together

    @property
    def bundle(self) -> Bundle:
        return self.together.bundles[self.index]

    @property
    def beside(self) -> tuple[str, ...]:
        """Engines whose devices are this process's too."""
        last = self.index == len(self.together.bundles) - 1
        return tuple(b.process for b in self.together.bundles[:-1]) if last else ()


@dataclass(frozen=True, slots=True)
class _Held:
    """A process, and the actor that holds it."""

    process: Process
    actor: Any


@dataclass
class RayCluster:
    """A `Place`: the cluster that this process is connected to."""

    ray: Any
    logs: str
    """Directory for the processes' output, on each node."""
    say: Callable[[str], None]
    _rooms: dict[str, _Room] = field(default_factory=dict, init=False)
    _held: dict[str, _Held] = field(default_factory=dict, init=False)
    _devices: dict[str, asyncio.Future[list[str]]] = field(default_factory=dict, init=False)

    @property
    def has_gpus(self) -> bool:
        return bool(self.ray.cluster_resources().get("GPU"))

    @property
    def here(self) -> str:
        """This node's address."""
        return str(self.ray.util.get_node_ip_address())

    def addresses(self) -> set[str]:
        """Of all living nodes."""
        return {node["NodeManagerAddress"] for node in self.ray.nodes() if node["Alive"]}

    def reserve(self, groups: tuple[Together, ...]) -> None:
        """Ask for every placement group, in this order. They come about as there is room."""
        ask = import_module("ray.util").placement_group
        for together in groups:
            bundles = [_resources(bundle) for bundle in together.bundles]
            group = ask(bundles, strategy="STRICT_PACK", name=f"weightplane-{together.name}")
            for index, bundle in enumerate(together.bundles):
                self._rooms[bundle.process] = _Room(group, index, together)

    async def run(self, process: Process, started: Callable[[str], None]) -> Ended:
        """See `Place`. If this is cancelled, `stop_all` ends the process."""
        room = self._rooms[process.name]
        await self._wait_for_room(process, room)
        held = self._held[process.name] = _Held(process, self._actor(room))
        try:
            async with asyncio.timeout(DEVICES_SECONDS + ANSWER_SECONDS):
                begun = await self._begin(held, room)
            started(f"pid {begun.pid} at {begun.address} on node {begun.node[:NODE_DIGITS]}")
            code, lines = await _answer(held.actor.wait.remote())
            outcome = Ended(code, how_it_ended(process.name, code, lines))
        except self.ray.exceptions.RayError as error:
            outcome = Ended(None, f"{process.name}: lost with its node or its actor: {_first_line(error)}")
        except TimeoutError:
            outcome = Ended(
                None, f"{process.name}: lost: its actor, or an engine that it is beside, did not answer in time"
            )
        self._let_go(held)
        return outcome

    async def stop_all(self) -> None:
        """See `Place`. The groups' room is given back."""
        for kind, seconds in STOP_SECONDS.items():
            of_kind = [held for held in self._held.values() if held.process.kind == kind]
            await asyncio.gather(*(self._stop(held, seconds) for held in of_kind))
        give_back = import_module("ray.util").remove_placement_group
        for group in {id(room.group): room.group for room in self._rooms.values()}.values():
            with contextlib.suppress(self.ray.exceptions.RayError):
                give_back(group)
        self.ray.shutdown()

    def hurry(self) -> None:
        """See `Place`. A process whose actor is gone gets SIGTERM, and SIGKILL soon after."""
        for held in self._held.values():
            self._kill(held)

    async def _begin(self, held: _Held, room: _Room) -> Begun:
        own: list[str] = await _answer(held.actor.devices.remote())
        self._told(held.process.name, own)
        shared = [device for engine in room.beside for device in await self._of(engine)]
        begun: Begun = await _answer(held.actor.begin.remote(held.process, own, shared, self.logs))
        return begun

    async def _wait_for_room(self, process: Process, room: _Room) -> None:
        ready = asyncio.ensure_future(_answer(room.group.ready()))
        try:
            while not (await asyncio.wait({ready}, timeout=ROOM_SECONDS))[0]:
                wanted = f"{room.together.cpus} CPUs and {room.together.gpus} GPUs"
                self.say(f"{process.name}: waits for a node with {wanted} free")
        finally:
            ready.cancel()

    def _actor(self, room: _Room) -> Any:
        strategy = import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        options = {"num_cpus": room.bundle.cpus, "num_gpus": room.bundle.gpus, "max_restarts": 0}
        where = strategy(room.group, placement_group_bundle_index=room.index)
        holder = self.ray.remote(RayProcess).options(
            **options, max_concurrency=METHODS_AT_ONCE, scheduling_strategy=where, name=None
        )
        return holder.remote()

    def _of(self, engine: str) -> asyncio.Future[list[str]]:
        """Its devices, when its present actor has told them."""
        return self._devices.setdefault(engine, asyncio.get_running_loop().create_future())

    def _told(self, engine: str, devices: list[str]) -> None:
        if self._of(engine).done():
            del self._devices[engine]
        self._of(engine).set_result(devices)

    def _let_go(self, held: _Held) -> None:
        self._held.pop(held.process.name, None)
        if self._of(held.process.name).done():
            del self._devices[held.process.name]
        self._kill(held)

    def _kill(self, held: _Held) -> None:
        with contextlib.suppress(self.ray.exceptions.RayError):
            self.ray.kill(held.actor)

    async def _stop(self, held: _Held, seconds: float) -> None:
        with contextlib.suppress(self.ray.exceptions.RayError, TimeoutError):
            async with asyncio.timeout(seconds + ANSWER_SECONDS):
                await _answer(held.actor.stop.remote(seconds))
        self._kill(held)


def connected(logs: str, say: Callable[[str], None]) -> RayCluster:
    """With the cluster at RAY_ADDRESS. Raises CommandFailed: no Ray here, or no cluster there."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray: Any = import_module("ray")
    except ModuleNotFoundError as error:
        raise CommandFailed(ExitCode.CONFIG, "ray is not installed here: pip install 'weightplane[ray]'") from error
    address = os.environ.get("RAY_ADDRESS", "auto")
    try:
        _knock(address)
        ray.init(address=address, log_to_driver=False, logging_level="warning", namespace="weightplane")
    except (OSError, RuntimeError, ValueError) as error:
        text = f"no Ray cluster answers at RAY_ADDRESS={address}: {_first_line(error)}"
        raise CommandFailed(ExitCode.UNREACHABLE, text) from error
    return RayCluster(ray, logs, say)


def _knock(address: str) -> None:
    """Ray tries for minutes, and then may end this process. Raises OSError: nobody listens there."""
    if ":" in address and "://" not in address:
        socket.create_connection(split_address(address), timeout=KNOCK_SECONDS).close()


def _resources(bundle: Bundle) -> dict[str, float]:
    return {"CPU": float(bundle.cpus)} | ({"GPU": float(bundle.gpus)} if bundle.gpus else {})


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


async def _answer(reference: Any) -> Any:
    """Of a remote call. A coroutine, so that it can be waited for with a limit."""
    return await reference
