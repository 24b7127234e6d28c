"""What a running fleet shows: one push of real ranks, seen in every process' metrics and log, and on the page."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import grpc
import pytest
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from tests.support.eventually import eventually
from tests.support.local_fleet import LocalFleet, local_fleet
from tests.support.ports import free_port
from tests.support.toy_rank import Script
from tests.support.toy_trainer import fleet_for_toys, start_engine, toy_trainer
from tests.support.writer import Weights
from weightplane.v1 import engine_pb2


async def read(address: str, path: str) -> str:
    return await asyncio.to_thread(lambda: urlopen(f"http://{address}{path}", timeout=60).read().decode())


def logged(lines: list[Any], update_id: str) -> set[str]:
    return {line["event"] for line in lines if line.get("update_id") == update_id}


async def test_a_push_is_seen_by_one_id_in_all_logs_and_in_everybodys_metrics(tmp_path: Path) -> None:
    at = {name: f"127.0.0.1:{free_port()}" for name in ("coordinator", "engine", "trainer", "page")}
    with capture_logs(processors=[merge_contextvars]) as lines:
        async with (
            fleet_for_toys(tmp_path, 1, metrics_listen=at["coordinator"], web_listen=at["page"]) as fleet,
            toy_trainer(fleet.address, metrics_listen=at["trainer"]) as trainer,
        ):
            start_engine(fleet, "e1", metrics_listen=at["engine"])
            await fleet.wait_for_engines(2)
            ranks = await trainer.start_ranks(Script(steps=1))
            await eventually(lambda: bool(ranks[0].said("pushed")))
            update_id = (await fleet.view()).updates[0].update_id
            await _tokens_are_counted_by_lag(fleet)
            await eventually(lambda: _metrics_tell_of_it(at))
            await _the_page_tells_of_it(at["page"], update_id)
    told = logged(lines, update_id)
    assert {"record_written"} <= told, "the coordinator"
    assert {"push_began", "push_ended"} <= told, "the trainer agent"
    assert [line for line in lines if line["event"] == "push_ended" and "reason" in line] == [], "it went well"
    assert {"weights_applied"} <= told, "the engine agents"


async def test_a_refusal_of_an_updates_stream_is_logged_under_its_id(tmp_path: Path) -> None:
    with capture_logs(processors=[merge_contextvars]) as lines:
        async with local_fleet(tmp_path, engines=1) as fleet:
            begun, weights = await fleet.begin(), Weights()
            stream = fleet.stream(begun, "e0")
            await stream.until_ready(weights)
            await fleet.go(begun.update_id)
            await stream.commit(weights, chunk_count=3)
            with pytest.raises(grpc.aio.AioRpcError):
                await stream.read()
            await fleet.decided(begun.update_id)
            assert "weights_applied" not in logged(lines, begun.update_id)
    assert "call_refused" in logged(lines, begun.update_id)


async def test_an_admin_sees_the_coordinators_connections(tmp_path: Path) -> None:
    channelz = pytest.importorskip("grpc_channelz.v1.channelz_pb2")
    stubs = pytest.importorskip("grpc_channelz.v1.channelz_pb2_grpc")
    fleet = LocalFleet(tmp_path)
    try:
        await fleet.start_coordinator(channelz=True)
        stub = stubs.ChannelzStub(fleet.channel(fleet.address))
        answer = await stub.GetServers(channelz.GetServersRequest(start_server_id=0), timeout=60)
        assert len(answer.server) >= 1
    finally:
        await fleet.close()


async def _tokens_are_counted_by_lag(fleet: LocalFleet) -> None:
    tokens, _, _ = await fleet.generate("e1", 7)

    async def counted() -> bool:
        return list((await fleet.engine("e1")).status.tokens_by_lag)[:2] == [len(tokens), 0]

    async def summed() -> bool:
        return [(s.model, sum(s.tokens_by_lag)) for s in (await fleet.view()).token_lags] == [("policy", len(tokens))]

    await eventually(counted)
    await eventually(summed)


async def _metrics_tell_of_it(at: dict[str, str]) -> bool:
    wanted = {
        "coordinator": (
            'weightplane_engine_applied_number{engine="e1"} 1.0',
            'weightplane_update_phase_seconds_count{model="policy",phase="go"}',
            "weightplane_event_loop_lag_seconds_count",
        ),
        "engine": ("weightplane_agent_applied_number 1.0", 'weightplane_installs_total{outcome="applied"}'),
        "trainer": ("weightplane_trainer_agent_term 1.0", 'weightplane_pushes_total{outcome="committed"}'),
    }
    for part, names in wanted.items():
        text = await read(at[part], "/metrics")
        assert [name for name in names if name not in text] == [], part
        assert "weightplane_pause_seconds_bucket" in text
    engine = await read(at["engine"], "/metrics")
    assert 'weightplane_received_bytes_total{transport="shared_memory"}' in engine
    assert 'weightplane_token_lag_commits_bucket{le="0.0",model="policy"}' in engine
    coordinator = await read(at["coordinator"], "/metrics")
    assert 'weightplane_model_token_lag_commits_count{model="policy"}' in coordinator
    return True


async def _the_page_tells_of_it(address: str, update_id: str) -> None:
    async def decided() -> bool:
        state = json.loads(await read(address, "/api/fleet"))
        return bool(state["updates"] and state["updates"][0].get("decide_time"))

    await eventually(decided)
    state = json.loads(await read(address, "/api/fleet"))
    update = state["updates"][0]
    assert (update["update_id"], update["phase"]) == (update_id, "UPDATE_PHASE_COMMITTED")
    for outcome in update["engines"]:
        assert outcome["stage_times"][-1]["stage"] == engine_pb2.UpdateStage.Name(engine_pb2.UPDATE_STAGE_APPLIED)
        assert outcome["timings"]["install"].endswith("s")
    assert {a["transport"] for a in state["plans"][0]["plan"]["assignments"]} == {"TRANSPORT_SHARED_MEMORY"}
    assert "update_decided" in {e["name"] for e in state["events"]}
    assert "Weightplane" in await read(address, "/")
