"""What an agent is made of, by its settings: the engine, its lives, the services, the door. Nothing runs yet."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc

from controlplane.config import ConfigError
from controlplane.core.engine_state import EngineState, Hold, HoldKind, Life, Residency
from controlplane.core.errors import EngineDied
from controlplane.core.fleet_catch_up import CHECKPOINT
from controlplane.core.versions import EngineId, Incarnation, ModelName, RunId
from controlplane.devices import cpu_device_uuid
from controlplane.rpc.security import HttpGuard, http_tls
from controlplane.software import TORCH, VLLM, software
from engine_agent.daemon.session import Membership
from engine_agent.daemon.settings import EngineSettings
from engine_agent.engine import Engine
from engine_agent.life.engine_life import EngineLife, EngineLifeHolder, LifeSettings
from engine_agent.life.remembered import Memory
from engine_agent.members.head import Members
from engine_agent.memory.engine import MemoryEngine
from engine_agent.receivers import transports_of
from engine_agent.services.lifecycle_service import LifecycleService
from engine_agent.services.rollout_service import RolloutService
from engine_agent.services.update_service import WeightUpdateService, add_weight_update
from engine_agent.vllm.further_nodes import FurtherNodes
from weightplane.local.v1 import member_pb2, member_pb2_grpc
from weightplane.v1 import (
    lifecycle_pb2,
    lifecycle_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
    weight_update_pb2,
)

if TYPE_CHECKING:
    from engine_agent.openai_door.answers import App
    from engine_agent.openai_door.running import RunningDoor


def door_of(holder: EngineLifeHolder, settings: EngineSettings) -> RunningDoor | None:
    """Raises PortUnavailable, ConfigError."""
    asked = settings.openai
    if asked is None:
        return None
    from engine_agent.openai_door.running import RunningDoor  # an agent without a door needs no HTTP libraries

    async def build(life: EngineLife) -> App:
        from engine_agent.openai_door.api_app import api_app
        from engine_agent.vllm.engine import VllmEngine

        assert isinstance(life.engine, VllmEngine)  # the settings refuse the door of any other
        return await api_app(life, life.engine, asked)

    try:
        guard = HttpGuard(http_tls(settings.tls, asked.tokens), settings.run_id)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError("openai", str(error)) from error
    return RunningDoor(holder, asked, build, guard)


def membership_of(settings: EngineSettings) -> Membership:
    reads = frozenset() if settings.checkpoint_root is None else frozenset({CHECKPOINT})
    transports = tuple(sorted(transports_of(settings.transports)))
    own = {"vllm": (TORCH, *VLLM), "memory": (TORCH,)}.get(settings.backend, ())
    return Membership(settings.group, settings.unit, settings.unit_size, reads, transports, tuple(software(own)))


def members_of(settings: EngineSettings) -> Members | None:
    further = 0 if settings.vllm is None else settings.vllm.further_nodes
    return Members(settings.run_id, settings.engine_id, further) if further else None


def first_life(settings: EngineSettings, memory: Memory, members: Members | None) -> EngineLife:
    """Dead from its beginning, without an engine, where an earlier agent noted that its devices are somebody else's."""
    lent = memory.lent()
    if lent is None:
        return new_life(settings, memory, members)
    holds = frozenset(Hold(HoldKind.ASLEEP, owner) for owner in lent.owners)
    frozen = settings.initial == "serve"
    asleep = replace(_new_state(settings), life=Life.DEAD, residency=Residency.ASLEEP, holds=holds, frozen=frozen)
    return new_life(settings, memory, members, asleep)


def _new_state(settings: EngineSettings) -> EngineState:
    return EngineState(
        RunId(settings.run_id),
        ModelName(settings.model),
        EngineId(settings.engine_id),
        Incarnation(uuid.uuid4().hex[:16]),
    )


def new_life(
    settings: EngineSettings, memory: Memory, members: Members | None, state: EngineState | None = None
) -> EngineLife:
    """`state`: what it begins with, if it is not a start."""
    takes = LifeSettings(settings.deltas, settings.keep_staging, settings.apply == "streaming", settings.pause)
    return EngineLife(state or _new_state(settings), new_engine(settings, members), memory, takes)


def new_engine(settings: EngineSettings, members: Members | None) -> Engine:
    devices = tuple(str(cpu_device_uuid(i)) for i in settings.cpu_devices)
    serve = settings.initial == "serve"
    if settings.backend == "memory":
        memory = replace(settings.memory, device_uuids=devices) if devices else settings.memory
        return MemoryEngine(memory, settings.engine_id, serve_initial=serve)
    if settings.backend == "external":
        return _external(settings, devices)
    if settings.vllm is None:
        raise EngineDied(engine_id=settings.engine_id, cause="backend vllm needs the settings under [vllm]")
    from engine_agent.vllm.engine import VllmEngine  # heavy: an agent with the in-memory engine needs no vLLM

    vllm = replace(settings.vllm, device_uuids=devices) if devices else settings.vllm
    vllm = replace(vllm, load_tokenizer=True) if settings.openai is not None else vllm
    note = settings.state_dir / f"{settings.engine_id}.processes.json"
    further = FurtherNodes(members, vllm, settings.engine_id) if members is not None else None
    return VllmEngine(vllm, settings.engine_id, serve_initial=serve, note=note, further=further)


def _external(settings: EngineSettings, devices: tuple[str, ...]) -> Engine:
    if settings.external is None:
        raise EngineDied(
            engine_id=settings.engine_id, cause="backend external needs the settings under [external]: url, model"
        )
    from engine_agent.external.engine import ExternalEngine  # aiohttp comes with the engines' extras

    external = replace(settings.external, device_uuids=devices) if devices else settings.external
    return ExternalEngine(external, settings.engine_id)


def services_of(
    holder: EngineLifeHolder, settings: EngineSettings, stop: asyncio.Event, members: Members | None
) -> list[Callable[[grpc.aio.Server], str]]:
    def add(register: Callable[[Any, grpc.aio.Server], None], servicer: object, name: str) -> Any:
        def add_to(server: grpc.aio.Server) -> str:
            register(servicer, server)
            return name

        return add_to

    own = [
        add(
            member_pb2_grpc.add_EngineMembersServicer_to_server,
            members,
            member_pb2.DESCRIPTOR.services_by_name["EngineMembers"].full_name,
        )
    ]
    return (own if members is not None else []) + [
        add(
            add_weight_update,
            WeightUpdateService(
                holder, settings.stream_idle_seconds, settings.checkpoint_root, transports_of(settings.transports)
            ),
            weight_update_pb2.DESCRIPTOR.services_by_name["WeightUpdate"].full_name,
        ),
        add(
            rollout_pb2_grpc.add_RolloutServicer_to_server,
            RolloutService(holder),
            rollout_pb2.DESCRIPTOR.services_by_name["Rollout"].full_name,
        ),
        add(
            lifecycle_pb2_grpc.add_LifecycleServicer_to_server,
            LifecycleService(holder, stop),
            lifecycle_pb2.DESCRIPTOR.services_by_name["Lifecycle"].full_name,
        ),
    ]
