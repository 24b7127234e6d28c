"""A coordinator's core that plans, engines on other hosts, and a trainer that says what it sends."""

from __future__ import annotations

from dataclasses import replace

from controlplane.core import fleet_effects as fx
from controlplane.core import fleet_events as events
from controlplane.core.engine_state import EngineState, Life
from controlplane.core.fleet_preview import Preview, preview
from controlplane.core.plan import EnginePlace, LinkFate, Load, Plan, RankPlace, Transport
from controlplane.core.versions import DeviceUuid, EngineId, Incarnation, ModelName, Rank, Term, TrainerId, UpdateId
from tests.support.fleet_core import POLICY, RUN, Fleet

GIB = 2**30
ALL = frozenset(Transport) - {Transport.CHECKPOINT}


def far_engine(f: Fleet, name: str, *capabilities: str, life: str = "i1") -> int:
    """On another host than the trainer, and able to receive whatever there is."""
    f.sessions += 1
    state = f.states[name] = EngineState(RUN, POLICY, EngineId(name), Incarnation(life), Life.RUNNING)
    devices = (DeviceUuid(f"far-{name}"),)
    place = EnginePlace(EngineId(name), state.incarnation, f"{name}:1", "far", devices, transports=ALL)
    f.handle(events.EngineConnected(f.sessions, place, state, False, capabilities, Term(0), Term(0)))
    return f.sessions


def begin(f: Fleet, update_id: str, **more: object) -> Plan:
    request = events.UpdateRequested(UpdateId(update_id), update_id, RUN, POLICY, Term(1), 1, None)
    effects = f.handle(replace(request, **more))  # type: ignore[arg-type]
    return next(x.update for x in effects if isinstance(x, fx.UpdatePlanned)).plan


LOAD = Load(tensor_count=290, byte_count=15 * GIB, chunk_bytes=64 * 2**20, largest_module_bytes=GIB // 2)


def trainer(f: Fleet, load: Load | None = LOAD, ranks: int = 3, model: ModelName = POLICY) -> int:
    f.sessions += 1
    places = tuple(RankPlace(Rank(n), "host", DeviceUuid(f"dev-{n}")) for n in range(ranks))
    f.handle(
        events.TrainerConnected(
            f.sessions, RUN, model, TrainerId("t0"), Incarnation("t1"), places, Term(0), "", False, ALL, load
        )
    )
    return f.sessions


def ask(f: Fleet, model: str = "", transport: Transport | None = None, fate: LinkFate | None = None) -> Preview:
    return preview(f.core, model, transport, fate)
