"""Plans on the wire, and what is read out of hellos."""

from __future__ import annotations

import pytest

from controlplane.core.engine_state import Held
from controlplane.core.errors import FrameInvalid
from controlplane.core.plan import HOST_MEMORY, Assignment, LinkFate, Load, Plan, Transport
from controlplane.core.versions import DeviceUuid, EngineId, Incarnation, Rank, Term, WeightVersion
from controlplane.rpc import plan_codec
from weightplane.v1 import engine_pb2, fleet_pb2, version_pb2, weight_update_pb2

HEX = "5f4dcc3b-5aa7-65d6-1d83-27deb882cf99"
BASE = Held(WeightVersion(6, Term(1)), b"b" * 32)


def hello(*devices: str, **more: object) -> fleet_pb2.EngineHello:
    status = engine_pb2.EngineStatus(engine=version_pb2.EngineRef(engine_id="e", incarnation="i"))
    values: dict[str, object] = {"status": status, "endpoint": "e:1", "host_id": "h", "device_uuids": devices}
    return fleet_pb2.EngineHello(**(values | more))  # type: ignore[arg-type]


def test_an_assignment_crosses_whole() -> None:
    place = plan_codec.engine_place_from_proto(hello("d0"))
    made = Assignment(
        engine=place,
        ranks=(Rank(3),),
        device_uuids=(DeviceUuid(""),),
        transport=Transport.BROADCAST,
        required=True,
        reason="why",
        link="3/shared",
        fate=LinkFate.SHARED,
        base=BASE,
    )
    told = plan_codec.plan_to_proto(Plan(7, (made,)))
    (found,) = told.assignments
    assert (told.revision, told.digest) == (7, Plan(7, (made,)).digest)
    assert (found.engine.engine_id, found.endpoint, list(found.ranks), found.leader) == ("e", "e:1", [3], 3)
    assert (found.transport, found.link) == (weight_update_pb2.TRANSPORT_BROADCAST, "3/shared")
    assert found.fate == weight_update_pb2.LINK_FATE_SHARED
    assert plan_codec.base_from_proto(found.base) == BASE


def test_every_transport_and_fate_of_the_wire_is_one_of_the_core() -> None:
    wire = {v for v in weight_update_pb2.Transport.values() if v}
    assert {plan_codec.TRANSPORTS[t] for t in Transport} == wire
    assert all(plan_codec.transport_from_proto(plan_codec.TRANSPORTS[t]) is t for t in Transport)
    assert set(plan_codec.FATES.values()) == {v for v in weight_update_pb2.LinkFate.values() if v}


def test_g9_what_drivers_and_torch_call_a_device_is_one_name_once_a_hello_is_read() -> None:
    ranks = [
        fleet_pb2.TrainerRankInfo(rank=1, host_id="h", device_uuid=f"gpu-{HEX.upper()}"),
        fleet_pb2.TrainerRankInfo(rank=0, host_id="h", device_uuid=" CPU-h-3"),
    ]
    places = plan_codec.rank_places_from_proto(fleet_pb2.TrainerHello(ranks=ranks))
    assert [(p.rank, p.device_uuid) for p in places] == [(0, "CPU-h-3"), (1, f"GPU-{HEX}")]
    assert plan_codec.engine_place_from_proto(hello(HEX, "CPU-h-3")).device_uuids == (f"GPU-{HEX}", "CPU-h-3")


def test_g9_two_workers_that_claim_one_device_are_refused_by_its_name() -> None:
    with pytest.raises(FrameInvalid, match=f"GPU-{HEX} stands more than once"):
        plan_codec.engine_place_from_proto(hello(HEX, "d", f"GPU-{HEX}"))


def test_who_states_no_transport_has_host_memory_and_who_states_some_has_these() -> None:
    stated = [weight_update_pb2.TRANSPORT_INLINE, weight_update_pb2.TRANSPORT_BROADCAST]
    assert plan_codec.engine_place_from_proto(hello("d")).transports == HOST_MEMORY
    assert plan_codec.engine_place_from_proto(hello("d", transports=stated)).transports == {
        Transport.INLINE,
        Transport.BROADCAST,
    }
    assert plan_codec.sends_from_proto(fleet_pb2.TrainerHello()) == HOST_MEMORY
    assert plan_codec.sends_from_proto(fleet_pb2.TrainerHello(transports=stated[:1])) == {Transport.INLINE}


def test_a_load_crosses_and_none_is_none() -> None:
    load = Load(4, 1000, 64, 400)
    assert plan_codec.load_from_proto(fleet_pb2.TrainerHello(load=plan_codec.load_to_proto(load))) == load
    assert plan_codec.load_from_proto(fleet_pb2.TrainerHello()) is None


def test_a_way_to_avoid_names_a_life_a_transport_and_a_cause() -> None:
    engine = version_pb2.EngineRef(engine_id="e", incarnation="i")
    message = fleet_pb2.AvoidedTransport(engine=engine, transport=weight_update_pb2.TRANSPORT_BROADCAST, cause="why")
    found = plan_codec.avoided_from_proto(message)
    assert (found.engine_id, found.incarnation) == (EngineId("e"), Incarnation("i"))
    assert (found.transport, found.cause) == (Transport.BROADCAST, "why")
