"""Pushes that stand still: what a deadline says of a rank or an engine that does not move, and of one that died."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import time
from pathlib import Path

import grpc
import pytest
from structlog.testing import capture_logs

from controlplane.core import errors as e
from controlplane.devices import cpu_device_uuid
from controlplane.exit_codes import ExitCode
from controlplane.failpoints import DIRECTORY_VARIABLE
from controlplane.rpc.channels import open_channel
from controlplane.rpc.errors import from_rpc_error
from tests.support.command_line import weightplane
from tests.support.eventually import eventually
from tests.support.lifecycle_calls import address_of, status_of, traced
from tests.support.local_fleet import RUN, LocalFleet
from tests.support.obedient import ObedientRanks
from tests.support.refusals import reason_of
from tests.support.toy_rank import SHAPES
from tests.support.toy_trainer import EngineProcess, fleet_for_toys, start_engine, toy_trainer
from weightplane.v1 import fleet_pb2, fleet_pb2_grpc, operator_pb2, operator_pb2_grpc

pytestmark = pytest.mark.timeout(400)

WHOLE = sum(4 * math.prod(shape) for shape in SHAPES.values())
LIMIT_SECONDS = 4.0
LATE_SECONDS = 120.0
"""Of a push that does not end; what is before the standing still takes less on a busy machine too."""
PROMPTLY = 20.0
"""Seconds; an operation of gloo alone waits for 30."""


async def test_a_rank_that_does_not_come_to_the_push_is_named_with_its_phase_and_its_stacks(tmp_path: Path) -> None:
    async with fleet_for_toys(tmp_path, engines=1) as fleet, toy_trainer(fleet.address) as trainer:
        ranks = await ObedientRanks.start(trainer, push_timeout=LIMIT_SECONDS)
        await ranks.all("train", step=7)
        ranks.tell(1, "stand_still", until=str(tmp_path / "go"))
        [answer] = await ranks.answers(ranks.tell(0, "push", step=8))
        assert answer["reason"] == "DEADLINE_EXCEEDED"
        assert answer["text"].startswith(f"push (begin): waited {LIMIT_SECONDS} s for rank 1 (phase train, step 7)")
        assert "stand_still" in traced(answer["stacks"])
        assert "rank 1 (pid" in answer["stacks"]
        assert "rank 0" not in answer["stacks"]
        (tmp_path / "go").touch()


async def test_a_rank_that_stands_still_in_its_weights_is_named_with_its_bytes_and_its_stacks(tmp_path: Path) -> None:
    async with fleet_for_toys(tmp_path, engines=1) as fleet, toy_trainer(fleet.address) as trainer:
        ranks = await ObedientRanks.start(trainer, push_timeout=LIMIT_SECONDS)
        with capture_logs() as logs:
            orders = [ranks.tell(i, "push_standing_still", step=1, until=str(tmp_path / "go")) for i in range(2)]
            await eventually(lambda: any(line["event"] == "push_ended" for line in logs))
        assert [line["reason"] for line in logs if line["event"] == "push_ended"] == ["DEADLINE_EXCEEDED"]
        (tmp_path / "go").touch()
        for answer in await ranks.answers(*orders):
            assert answer["reason"] == "DEADLINE_EXCEEDED"
            assert re.match(r"push \(preparing\): waited [4-9]\.", answer["text"]), answer["text"]
            assert " for rank 0 (exported " in answer["text"]
            assert f"of {WHOLE} bytes)" in answer["text"]
            assert "stand_still" in traced(answer["stacks"])
        assert await fleet.applied("e0") is None
        await the_coordinator_keeps_them(fleet)


async def test_what_hangs_is_seen_also_where_the_coordinators_own_limit_comes_first(tmp_path: Path) -> None:
    """As with the settings' own values: 300 s until ready, and ten minutes for a push."""
    async with (
        fleet_for_toys(tmp_path, engines=1, ready_limit_seconds=LIMIT_SECONDS) as fleet,
        toy_trainer(fleet.address) as trainer,
    ):
        ranks = await ObedientRanks.start(trainer, push_timeout=LATE_SECONDS)
        with capture_logs() as logs:
            orders = [ranks.tell(i, "push_standing_still", step=1, until=str(tmp_path / "go")) for i in range(2)]
            await eventually(lambda: any(line["event"] == "stacks" for line in logs))
        first = min((await fleet.view()).updates, key=lambda update: update.version.number)
        assert first.phase == fleet_pb2.UPDATE_PHASE_FAILED
        assert first.cause == "not ready in time: e0"
        (tmp_path / "go").touch()
        await ranks.answers(*orders)  # the push is repeated, and comes about
        async with open_channel(fleet.address) as channel:
            operator = operator_pb2_grpc.OperatorStub(channel)
            asked = operator_pb2.GetStacksRequest(update_id=first.update_id)
            found = await operator.GetStacks(asked, timeout=60)
        assert found.processes[0].name == "rank 0"
        assert "stand_still" in traced(found.processes[0].text or found.processes[0].problem)


async def the_coordinator_keeps_them(fleet: LocalFleet) -> None:
    """After the decision too; and takes no others from whom the term is not."""
    [update] = (await fleet.view()).updates
    assert update.phase == fleet_pb2.UPDATE_PHASE_FAILED
    asked = operator_pb2.GetStacksRequest(update_id=update.update_id)
    async with open_channel(fleet.address) as channel:
        operator, stub = operator_pb2_grpc.OperatorStub(channel), fleet_pb2_grpc.FleetStub(channel)

        async def kept() -> bool:
            return len((await operator.GetStacks(asked, timeout=60)).processes) > 0

        await eventually(kept)
        found = await operator.GetStacks(asked, timeout=60)
        assert found.processes[0].name == "rank 0"
        assert "stand_still" in traced(found.processes[0].text or found.processes[0].problem)
        assert found.report_time.seconds > 0
        told = fleet_pb2.ReportStacksRequest(run_id=RUN, update_id=update.update_id, term=update.version.term + 1)
        assert await reason_of(stub.ReportStacks(told, timeout=60)) == "STALE_TERM"
        told.update_id = "no-such-update"
        assert await reason_of(stub.ReportStacks(told, timeout=60)) == "UNKNOWN_UPDATE"
    code, why, _ = await weightplane(fleet, "why", "latest", "--stacks")
    assert (code, "when its limit came, at" in why) == (ExitCode.OK, True)
    assert "stand_still" in traced(why)
    _, why_json, _ = await weightplane(fleet, "why", "latest", "--stacks", "--json")
    assert "rank 0 (pid" in json.loads(why_json)["stacks"][1]


async def test_an_engine_that_does_not_read_is_named_with_the_bytes_that_went(tmp_path: Path) -> None:
    async with fleet_for_toys(tmp_path, engines=0) as fleet, toy_trainer(fleet.address) as trainer:
        process = await EngineProcess.start(fleet)
        await fleet.wait_for_engines(1)
        ranks = await ObedientRanks.start(trainer, push_timeout=LIMIT_SECONDS)
        os.kill(process._process.pid, signal.SIGSTOP)
        try:
            for answer in await ranks.all("push", step=1):
                assert answer["reason"] in ("DEADLINE_EXCEEDED", "UPDATE_FAILED")
                if answer["reason"] == "DEADLINE_EXCEEDED":
                    assert "e0 (" in answer["text"]
                    assert f"of {WHOLE} bytes sent)" in answer["text"]
                    assert "e0 (pid 0):" in answer["stacks"], "it does not answer; that is said"
        finally:
            os.kill(process._process.pid, signal.SIGCONT)
        await process.stop()


async def test_a_rank_killed_in_the_middle_of_a_gather_ends_the_other_ones_collective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    async with fleet_for_toys(tmp_path, engines=0) as fleet, toy_trainer(fleet.address) as trainer:
        start_engine(fleet, "tp2", device_uuids=(cpu_device_uuid(0), cpu_device_uuid(1)))
        await fleet.wait_for_engines(1)
        ranks = await ObedientRanks.start(trainer)
        (tmp_path / "rank.between_chunks").write_text("kill after=3")
        orders = [ranks.tell(i, "push", step=1) for i in range(2)]
        assert await ranks.ranks[0].code() == -signal.SIGKILL
        died = time.monotonic()
        [answer] = await ranks.answers(orders[1])
        assert time.monotonic() - died < PROMPTLY
        assert answer["reason"] == "PEER_LOST"
        assert "rank 0 went away" in answer["text"]
        assert await fleet.applied("tp2") is None


async def test_a_rank_killed_in_the_source_s_own_collective_is_named_by_the_ones_that_met_it_there(
    tmp_path: Path,
) -> None:
    async with fleet_for_toys(tmp_path, engines=1) as fleet, toy_trainer(fleet.address) as trainer:
        ranks = await ObedientRanks.start(trainer)
        await ranks.all("meet", at=str(tmp_path / "meeting"), world=2)
        assert [a["event"] for a in await ranks.all("push", step=1)] == ["did", "did"]
        order = ranks.tell(0, "push", step=2)
        ranks.tell(1, "push_standing_still", step=2, until=str(tmp_path / "never"))

        async def in_the_middle() -> bool:
            update = (await status_of(fleet, address_of(trainer))).update
            return update.phase == fleet_pb2.UPDATE_PHASE_PREPARING and bool(update.update_id)

        await eventually(in_the_middle)
        ranks.ranks[1].kill()
        died = time.monotonic()
        [answer] = await ranks.answers(order)
        assert time.monotonic() - died < PROMPTLY
        assert answer["reason"] == "PEER_LOST"
        assert "rank 1 went away" in answer["text"], "not: a broken connection"


async def test_ranks_that_live_and_do_not_move_lose_the_lease_to_whoever_asks(tmp_path: Path) -> None:
    limits = {"lease_ttl_seconds": 2.0, "step_limit_seconds": 2.0}
    async with fleet_for_toys(tmp_path, engines=0, **limits) as fleet, toy_trainer(fleet.address) as trainer:
        ranks = await ObedientRanks.start(trainer)
        for i in range(2):
            ranks.tell(i, "stand_still", until=str(tmp_path / "go"))
        refused: list[e.WeightplaneError] = []

        async def taken() -> int:
            try:
                return await fleet.take_lease(trainer_id="other")
            except grpc.aio.AioRpcError as error:
                refused.append(from_rpc_error(error))
                raise AssertionError(str(refused[-1])) from error

        assert await eventually(taken) == 2
        assert {r.reason for r in refused} == {"LEASE_HELD"}, "while it moved it was theirs"
        assert [r.process.returncode for r in ranks.ranks] == [None, None], "they live"
        await eventually(trainer.agent.refused_event.is_set)
        (tmp_path / "go").touch()
        assert [a["reason"] for a in await ranks.all("push", step=1)] == ["STALE_TERM"] * 2
        assert [await r.code() for r in ranks.ranks] == [ExitCode.FENCED] * 2
