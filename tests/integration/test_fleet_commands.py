"""The commands for people, as processes, against a real coordinator and real engine agents."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from controlplane.cli.plan_table import plan_json
from controlplane.cli.rollback import _follow
from controlplane.core import errors as e
from controlplane.exit_codes import ExitCode
from controlplane.rpc.channels import open_channel
from controlplane.rpc.server import start_server
from tests.support.command_line import weightplane
from tests.support.engine_by_hand import engine_that_says
from tests.support.eventually import PATIENCE_SECONDS, eventually
from tests.support.local_fleet import LocalFleet
from tests.support.obedient import ObedientRanks
from tests.support.toy_rank import SHAPES
from tests.support.toy_trainer import fleet_for_toys, start_engine, toy_trainer
from weightplane.v1 import fleet_pb2, fleet_pb2_grpc, operator_pb2, operator_pb2_grpc

pytestmark = pytest.mark.timeout(400)


async def push(fleet: LocalFleet, root: Path, steps: int) -> None:
    async with toy_trainer(fleet.address, checkpoint_root=root, checkpoint_keep=9) as trainer:
        ranks = await ObedientRanks.start(trainer)
        for step in range(1, steps + 1):
            await fleet.settled()
            assert [a["status"] for a in await ranks.all("push", step=step)] == ["COMMITTED"] * 2
            # A checkpoint is written beside training: a push that comes before its end writes none.
            await eventually(partial(_checkpoints, fleet, step))
        assert await ranks.leave() == [0, 0]
    await fleet.settled()


async def _checkpoints(fleet: LocalFleet, count: int) -> bool:
    return len((await fleet.view()).checkpoints) == count


async def test_engines_shows_what_each_holds_and_what_is_true_of_it(tmp_path: Path) -> None:
    async with fleet_for_toys(tmp_path) as fleet:
        await push(fleet, tmp_path / "checkpoints", 1)
        code, out, _ = await weightplane(fleet, "engines", "--json")
        assert code == ExitCode.OK
        said = {e["engine"]: e for e in json.loads(out)["engines"]}
        assert {n: (e["applied"], e["desired"], e["refused"]) for n, e in said.items()} == {
            "e0": ("1.1", "1.1", None),
            "e1": ("1.1", "1.1", None),
        }
        assert _true_of(said["e0"]) >= {"Running", "WeightsHeld", "Current", "Resident", "Known"}
        code, out, _ = await weightplane(fleet, "engines")
        assert code == ExitCode.OK
        assert out.splitlines()[1].split()[:4] == ["e0", "serving", "1.1", "1.1"]
        await fleet.stop("e1")
        code, out, _ = await weightplane(fleet, "engines", "--json")
        assert [e["engine"] for e in json.loads(out)["engines"]] == ["e0"], "it said goodbye"


def _true_of(engine: dict[str, Any]) -> set[str]:
    return {c["type"] for c in engine["conditions"] if c["status"] == "True"}


async def test_a_plan_names_bytes_and_memory_and_uses_no_number(tmp_path: Path) -> None:
    total = sum(math.prod(s) * 4 for s in SHAPES.values())
    async with (
        fleet_for_toys(tmp_path, lease_ttl_seconds=PATIENCE_SECONDS) as fleet,
        toy_trainer(fleet.address) as trainer,
    ):
        ranks = await ObedientRanks.start(trainer)
        code, out, _ = await weightplane(fleet, "plan", "--json")
        said = json.loads(out)
        assert (code, said["rank_count"], said["load"]["byte_count"]) == (ExitCode.OK, 2, total)
        assert said["load"]["largest_module_bytes"] == math.prod(SHAPES["head"]) * 4
        async with engine_that_says(fleet):  # on another host, and for as long as it is not missed
            stub: Any = operator_pb2_grpc.OperatorStub(fleet.channel(fleet.address))
            said = plan_json(await stub.Plan(operator_pb2.PlanRequest(), timeout=60))
        assert [(e["engine"], e["transport"], e["staging_bytes"]) for e in said["engines"]] == [
            ("by-hand", "inline", total),
            ("e0", "shared_memory", 0),
            ("e1", "shared_memory", 0),
        ]
        assert "not broadcast: the engine does not receive it" in said["engines"][0]["reason"]
        assert [(s["rank"], s["memory_bytes"]) for s in said["senders"]] == [(0, total), (1, total)]
        assert [a["version"] for a in await ranks.all("push", step=1)] == [1, 1]
        assert await ranks.leave() == [0, 0]


async def test_a_plan_that_would_be_refused_says_why_and_ends_with_1(tmp_path: Path) -> None:
    async with fleet_for_toys(tmp_path, engines=0) as fleet, toy_trainer(fleet.address) as trainer:
        code, out, err = await weightplane(fleet, "plan")
        assert (code, out) == (ExitCode.FAILED, "")
        assert err == "weightplane: INVALID_REQUEST: model: no trainer is known here\n"
        await ObedientRanks.start(trainer)
        code, out, _ = await weightplane(fleet, "plan", "policy")
        assert code == ExitCode.FAILED
        assert "would be refused: NO_ENGINES: no live, awake engine of model policy could take an update" in out


async def test_a_rollback_to_what_nobody_kept_names_what_there_is(tmp_path: Path) -> None:
    async with fleet_for_toys(tmp_path) as fleet:
        await push(fleet, tmp_path / "checkpoints", 2)
        code, out, err = await weightplane(fleet, "rollback", "policy", "9")
        assert (code, out) == (ExitCode.FAILED, "")
        assert err.startswith("weightplane: CHECKPOINT_UNKNOWN: no checkpoint of number 9 of model policy")
        assert err.endswith("known are: 1.2, 1.1\n")


async def test_a_rollback_that_engines_cannot_carry_out_fails_and_changes_nothing(tmp_path: Path) -> None:
    async with fleet_for_toys(tmp_path) as fleet:
        await push(fleet, tmp_path / "checkpoints", 2)
        code, out, _ = await weightplane(fleet, "rollback", "policy", "1")
        assert code == ExitCode.FAILED
        assert out.splitlines()[-1].startswith("failed: what was served is served on:")
        assert [await fleet.applied(e) for e in ("e0", "e1")] == [2, 2]
        assert [e.routable for e in (await fleet.view()).engines] == [True, True]


async def test_a_rollback_is_followed_to_its_commit(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    async with fleet_for_toys(tmp_path, engines=0) as fleet:
        for name in ("e0", "e1"):
            start_engine(fleet, name, checkpoint_root=root)
        await fleet.wait_for_engines(2)
        await push(fleet, root, 2)
        code, out, err = await weightplane(fleet, "rollback", "policy", "1")
        assert (code, err) == (ExitCode.OK, "")
        lines = out.splitlines()
        assert lines[0].startswith("version 1.3 brings back 1.1 (update ")
        assert {"go: every engine that it needs is ready", "e0 applied", "e1 applied"} <= set(lines)
        assert lines[-1] == "committed: the fleet serves 1.3, with the weights of 1.1"
        first = next(c for c in (await fleet.view()).checkpoints if c.version.number == 1)
        statuses = [await fleet.status(e) for e in ("e0", "e1")]
        assert [(s.applied.number, s.content_digest) for s in statuses] == [(3, first.content_digest)] * 2


class Restarting(fleet_pb2_grpc.FleetServicer):
    """A coordinator that is away in the middle of an update."""

    def __init__(self) -> None:
        self.asked = 0

    async def WatchUpdate(
        self, request: fleet_pb2.WatchUpdateRequest, context: Any
    ) -> AsyncIterator[fleet_pb2.WatchUpdateResponse]:
        self.asked += 1
        if self.asked == 2:
            raise e.CoordinatorRecovering(term=2, engines=["e0"])
        phase = fleet_pb2.UPDATE_PHASE_PREPARING if self.asked == 1 else fleet_pb2.UPDATE_PHASE_COMMITTED
        yield fleet_pb2.WatchUpdateResponse(state=fleet_pb2.UpdateState(update_id="u", phase=phase))
        if self.asked == 1:
            raise e.PeerLost(peer="the coordinator", cause="it stops")


async def test_a_rollback_is_followed_over_a_restart_of_the_coordinator() -> None:
    service = Restarting()  # type: ignore[abstract]

    def register(server: grpc.aio.Server) -> str:
        fleet_pb2_grpc.add_FleetServicer_to_server(service, server)
        return "weightplane.v1.Fleet"

    running = await start_server("127.0.0.1:0", [register])
    async with open_channel(running.address) as channel:
        state = await _follow(channel, "run", "u")
    await running.stop()
    assert state.phase == fleet_pb2.UPDATE_PHASE_COMMITTED
    assert service.asked == 3


async def test_an_older_ledger_is_accepted_once_and_the_fleet_goes_on_above_what_was_seen(tmp_path: Path) -> None:
    async with fleet_for_toys(tmp_path, lease_ttl_seconds=PATIENCE_SECONDS) as fleet:
        async with engine_that_says(fleet, max_number=50):
            _, out, _ = await weightplane(fleet, "status")
            assert "LEDGER REGRESSED" in out.splitlines()[1]
            code, out, _ = await weightplane(fleet, "ledger", "accept", "--by", "ann")
            assert code == ExitCode.OK
            what = "the ledger knows number 0, and by-hand has seen 50: it is an older copy"
            assert out.splitlines()[0] == f"accepted, though {what}"
            assert out.splitlines()[-1] == "coordinator term 2, next number 51"
        await eventually(lambda: _all_back(fleet))
        code, out, _ = await weightplane(fleet, "ledger", "accept")
        assert code == ExitCode.OK
        assert out.splitlines()[0] == "nothing was to be accepted: no agent knows more than the ledger"
        assert out.splitlines()[-1] == "coordinator term 2, next number 51"
        _, out, _ = await weightplane(fleet, "status")
        assert "LEDGER REGRESSED" not in out


async def _all_back(fleet: LocalFleet) -> bool:
    return {e.status.engine.engine_id for e in (await fleet.view()).engines if e.known} >= {"e0", "e1"}
