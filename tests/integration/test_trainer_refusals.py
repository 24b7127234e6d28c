"""What a coordinator that refuses does to a trainer: a frozen model, a ledger that is an older copy.

The engines here are sessions by hand: they say what the test wants said.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from controlplane.exit_codes import ExitCode
from tests.support.engine_by_hand import engine_that_says
from tests.support.eventually import eventually
from tests.support.local_fleet import LocalFleet
from tests.support.obedient import ObedientRanks
from tests.support.toy_rank import Script
from tests.support.toy_trainer import fleet_for_toys, toy_trainer
from tests.support.trainer_process import Trainer, events
from weightplane.v1 import engine_pb2, operator_pb2, operator_pb2_grpc, version_pb2

pytestmark = pytest.mark.timeout(400)


async def accept_ledger(fleet: LocalFleet) -> operator_pb2.AcceptLedgerResponse:
    stub: Any = operator_pb2_grpc.OperatorStub(fleet.channel(fleet.address))
    response = await stub.AcceptLedger(operator_pb2.AcceptLedgerRequest(accepted_by="ann"), timeout=60)
    assert isinstance(response, operator_pb2.AcceptLedgerResponse)
    return response


async def test_a_trainer_of_a_frozen_model_ends_with_the_code_for_a_wrong_set_up(tmp_path: Path) -> None:
    frozen = {
        "frozen": True,
        "weights": engine_pb2.WEIGHTS_STATE_HELD,
        "applied": version_pb2.WeightVersion(term=0, number=0),
        "content_digest": b"d" * 32,
    }
    async with fleet_for_toys(tmp_path, engines=0) as fleet, engine_that_says(fleet, status=frozen):
        trainer = await Trainer.start(fleet, Script(catch=False), max_restarts=3)
        code, lines = await trainer.finish()
        assert code == ExitCode.CONFIG
        refused = events(lines, "refused")
        assert {r["reason"] for r in refused} == {"MODEL_FROZEN"}
        assert len({r["pid"] for r in refused}) == 2, "it was started once"


async def test_the_lease_is_waited_for_while_a_person_must_accept_the_ledger(tmp_path: Path) -> None:
    with capture_logs() as logs:
        async with (
            fleet_for_toys(tmp_path) as fleet,
            engine_that_says(fleet, max_number=50),
            toy_trainer(fleet.address) as trainer,
        ):
            ranks = await trainer.start_ranks(Script(steps=1))
            await eventually(lambda: len(waits(logs)) >= 3, within=180)
            assert all(rank.process.returncode is None for rank in ranks), "no rank was refused"
            accepted = await accept_ledger(fleet)
            assert accepted.next_number == 51
            assert [await r.code() for r in ranks] == [0, 0]
            assert [p["version"] for p in ranks[0].said("pushed")] == [51]
    assert "weightplane ledger accept" in waits(logs)[0]["cause"]


async def test_a_push_waits_within_its_limit_while_a_person_must_accept_the_ledger(tmp_path: Path) -> None:
    with capture_logs() as logs:
        async with fleet_for_toys(tmp_path) as fleet, toy_trainer(fleet.address) as trainer:
            ranks = await ObedientRanks.start(trainer, push_timeout=180.0)
            await ranks.all("push", step=1)
            async with engine_that_says(fleet, max_number=50):
                pushes = [ranks.tell(rank, "push", step=2) for rank in range(2)]
                await eventually(lambda: any(line["event"] == "begin_waits" for line in logs), within=120)
                await accept_ledger(fleet)
            assert all(pushed["version"] > 50 for pushed in await ranks.answers(*pushes))
            assert ranks.ranks[0].said("joined")[0]["term"] == 1
            assert await ranks.leave() == [0, 0]


def waits(logs: list[Any]) -> list[Any]:
    return [x for x in logs if x["event"] == "session_broken" and x["reason"] == "LEDGER_REGRESSED"]


async def test_inv_7_a_trainer_above_an_older_ledger_is_not_fenced_and_goes_on_once_the_newer_one_is_back(
    tmp_path: Path,
) -> None:
    state, older, newer = tmp_path / "coordinator", tmp_path / "older", tmp_path / "newer"
    with capture_logs() as logs:
        async with fleet_for_toys(tmp_path) as fleet:
            async with toy_trainer(fleet.address) as trainer:
                before = await trainer.start_ranks(Script(steps=1))
                assert [await r.code() for r in before] == [0, 0]
            await fleet.stop("coordinator")
            shutil.copytree(state, older)
            await fleet.start_coordinator()
            await fleet.wait_for_engines(2)
            async with toy_trainer(fleet.address) as trainer:
                ranks = await ObedientRanks.start(trainer, push_timeout=180.0)
                await ranks.all("push", step=1)
                await fleet.stop("coordinator")
                state.rename(newer)
                older.rename(state)
                await fleet.start_coordinator()
                pushes = [ranks.tell(rank, "push", step=2) for rank in range(2)]
                await eventually(lambda: bool(waits(logs)) and bool(held_up(logs)), within=120)
                await fleet.stop("coordinator")
                shutil.rmtree(state)
                newer.rename(state)
                await fleet.start_coordinator()
                assert [answer["event"] for answer in await ranks.answers(*pushes)] == ["did", "did"]
                assert ranks.ranks[0].said("joined")[0]["term"] == 2
                assert await ranks.leave() == [0, 0]


def held_up(logs: list[Any]) -> list[Any]:
    """Begins that wait for a person."""
    return [x for x in logs if x["event"] == "begin_waits" and x["log_level"] == "warning"]
