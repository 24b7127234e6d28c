"""`Lifecycle` of trainer agents and engine agents: status, end, the ranks' output, stacks; what deadlines say."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from structlog.testing import capture_logs

from controlplane.core import errors as e
from controlplane.devices import cpu_device_uuid
from controlplane.exit_codes import ExitCode
from controlplane.failpoints import DIRECTORY_VARIABLE
from controlplane.rpc.channels import open_channel
from controlplane.rpc.errors import from_rpc_error
from controlplane.software import MEGATRON, TORCH, software
from tests.integration.test_fleet_commands import weightplane
from tests.support.eventually import eventually
from tests.support.local_fleet import RUN, LocalFleet
from tests.support.obedient import ObedientRanks
from tests.support.toy_rank import SHAPES, Script
from tests.support.toy_trainer import EngineProcess, ToyTrainer, fleet_for_toys, start_engine, toy_trainer
from weightplane.v1 import fleet_pb2, fleet_pb2_grpc, lifecycle_pb2, lifecycle_pb2_grpc, operator_pb2, operator_pb2_grpc

pytestmark = pytest.mark.timeout(400)

TOY = Path(__file__).parents[1] / "support" / "toy_rank.py"
ROOT = Path(__file__).parents[2]
WHOLE = sum(4 * math.prod(shape) for shape in SHAPES.values())
LIMIT_SECONDS = 4.0
LATE_SECONDS = 120.0
"""Of a push that does not end; what is before the standing still takes less on a busy machine too."""
PROMPTLY = 20.0
"""Seconds; an operation of gloo alone waits for 30."""
TOLD_SECONDS = 5.0
"""What is told at once takes milliseconds; more only where the machine is busy."""


def lifecycle(fleet: LocalFleet, address: str) -> Any:
    return lifecycle_pb2_grpc.LifecycleStub(fleet.channel(address))


def address_of(trainer: ToyTrainer) -> str:
    serving = trainer.agent._serving
    assert serving is not None
    return serving.address


async def status_of(fleet: LocalFleet, address: str) -> lifecycle_pb2.TrainerAgentStatus:
    response = await lifecycle(fleet, address).GetStatus(lifecycle_pb2.GetStatusRequest(run_id=RUN), timeout=60)
    assert isinstance(response.trainer, lifecycle_pb2.TrainerAgentStatus)
    return response.trainer


async def refusal(call: Any) -> tuple[grpc.StatusCode, e.WeightplaneError]:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value.code(), from_rpc_error(raised.value)


def traced(text: str) -> str:
    """Stacks, where this machine lets us look."""
    assert "py-spy is not installed" not in text
    if "py-spy:" in text and "Permission" in text:
        pytest.skip(f"this machine does not let a process look at another: {text}")
    return text


# ---- status -------------------------------------------------------------------------------------


async def test_a_trainer_agent_says_what_its_ranks_do_and_how_they_ended(tmp_path: Path) -> None:
    async with fleet_for_toys(tmp_path, engines=1) as fleet, toy_trainer(fleet.address) as trainer:
        ranks = await ObedientRanks.start(trainer)
        await ranks.all("train", step=4)
        status = await status_of(fleet, address_of(trainer))
        assert (status.trainer_id, status.model, status.run_id, status.term) == ("toy", "policy", RUN, 1)
        assert [(r.rank, r.pid, r.step) for r in status.ranks] == [
            (i, rank.process.pid, 4) for i, rank in enumerate(ranks.ranks)
        ]
        assert {r.state for r in status.ranks} == {lifecycle_pb2.RANK_STATE_TRAINING}
        assert not status.HasField("update")
        waiting = ranks.tell(0, "push", step=5)

        async def pushing() -> bool:
            found = (await status_of(fleet, address_of(trainer))).ranks
            return [r.state for r in found] == [lifecycle_pb2.RANK_STATE_PUSHING, lifecycle_pb2.RANK_STATE_TRAINING]

        await eventually(pushing)
        ranks.ranks[1].kill()
        await ranks.answers(waiting)
        gone = (await status_of(fleet, address_of(trainer))).ranks[1]
        assert gone.state == lifecycle_pb2.RANK_STATE_ENDED
        assert gone.cause == f"process {gone.pid} ended"


async def test_a_rank_that_dies_is_told_to_the_coordinator_at_once_and_one_that_leaves_is_not(tmp_path: Path) -> None:
    """Beside training, where no push would tell; and heartbeats are a minute apart."""
    slow = {"heartbeat_seconds": 60.0, "lease_ttl_seconds": 200.0}
    async with fleet_for_toys(tmp_path, engines=0, **slow) as fleet, toy_trainer(fleet.address) as trainer:
        ranks = await ObedientRanks.start(trainer, world=3)
        leaving, dying = ranks.ranks[2].process, ranks.ranks[1].process
        assert leaving.stdin is not None
        leaving.stdin.close()
        assert await leaving.wait() == 0
        await ranks.answers(ranks.tell(0, "train", step=1), ranks.tell(1, "train", step=1))
        dying.kill()
        await dying.wait()
        died = time.monotonic()

        async def lost() -> list[tuple[int, str]]:
            return [(r.rank, r.cause) for r in (await fleet.view()).trainers[0].status.lost_ranks]

        await eventually(lost)
        assert time.monotonic() - died < TOLD_SECONDS
        assert await lost() == [(1, f"process {dying.pid} ended")]
        code, out, _ = await weightplane(fleet, "status", "--json")
        [status] = [t["status"] for t in json.loads(out)["trainers"]]
        assert (code, [r["rank"] for r in status["lost_ranks"]]) == (ExitCode.OK, [1])


async def test_a_trainer_agent_refuses_what_is_not_its_own(tmp_path: Path) -> None:
    async with fleet_for_toys(tmp_path, engines=0) as fleet, toy_trainer(fleet.address) as trainer:
        stub = lifecycle(fleet, address_of(trainer))
        await ObedientRanks.start(trainer, world=1)
        fence: dict[str, Any] = {"run_id": RUN, "engine": {"engine_id": "e", "incarnation": "i"}, "owner": "o"}
        for call in (
            stub.PauseGeneration(lifecycle_pb2.PauseGenerationRequest(**fence)),
            stub.ResumeGeneration(lifecycle_pb2.ResumeGenerationRequest(**fence)),
            stub.Sleep(lifecycle_pb2.SleepRequest(**fence, level=1)),
            stub.WakeUp(lifecycle_pb2.WakeUpRequest(**fence)),
            stub.Drain(lifecycle_pb2.DrainRequest(**fence)),
            stub.WatchStatus(lifecycle_pb2.WatchStatusRequest(run_id=RUN)).read(),
            stub.TailLogs(lifecycle_pb2.TailLogsRequest(run_id=RUN, rank=0)),
        ):
            code, error = await refusal(call)
            assert (code, error.reason) == (grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED_BY_ENGINE")
            assert "trainer agent toy" in str(error)
        _, error = await refusal(stub.GetStatus(lifecycle_pb2.GetStatusRequest(run_id="other")))
        assert error.reason == "WRONG_RUN"
        _, error = await refusal(stub.Shutdown(lifecycle_pb2.ShutdownRequest(run_id=RUN, incarnation="other")))
        assert error.reason == "WRONG_INCARNATION"
        life = (await status_of(fleet, address_of(trainer))).incarnation
        _, error = await refusal(stub.Shutdown(lifecycle_pb2.ShutdownRequest(run_id=RUN, incarnation=life)))
        assert "its ranks are their launcher's to end" in str(error)
        _, error = await refusal(stub.DumpStacks(lifecycle_pb2.DumpStacksRequest(run_id=RUN, ranks=[0, 7])))
        assert "ranks [7] are not there; there are [0]" in str(error)


# ---- a launched trainer -------------------------------------------------------------------------


async def launched(fleet: LocalFleet, at: Path, script: Script) -> asyncio.subprocess.Process:
    """A trainer agent with two ranks, as a process; its address comes to `at`."""
    code = (
        "import asyncio, sys; from pathlib import Path;"
        "from trainer_agent.agent import TrainerSettings, run_trainer;"
        f"settings = TrainerSettings(coordinator={fleet.address!r}, nproc_per_node=2, max_restarts=3,"
        f" stop_seconds=10.0, address_file=Path({str(at)!r}));"
        f"sys.exit(asyncio.run(run_trainer(settings, [{str(TOY)!r}, {json.dumps(asdict(script))!r}])))"
    )
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        code,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}"},
        cwd=ROOT,
    )


async def test_a_launched_trainer_tells_what_its_ranks_wrote_and_ends_when_it_is_told(tmp_path: Path) -> None:
    at = tmp_path / "trainer"
    script = Script(steps=500, pause_before_step=0.1)
    async with fleet_for_toys(tmp_path, engines=1) as fleet:
        process = await launched(fleet, at, script)
        await eventually(lambda: at.exists() and at.read_text(), within=180)
        stub = lifecycle(fleet, at.read_text())

        async def tail(rank: int, lines: int) -> list[str]:
            request = lifecycle_pb2.TailLogsRequest(run_id=RUN, rank=rank, lines=lines)
            return [line.text for line in (await stub.TailLogs(request, timeout=60)).lines]

        async def pushed() -> bool:
            return all(['"pushed"' in " ".join(await tail(rank, 1000)) for rank in (0, 1)])

        await eventually(pushed, within=180)
        assert len(await tail(1, 2)) == 2
        assert all('"rank": 0' in line for line in await tail(0, 1000) if line.startswith("{"))
        _, error = await refusal(stub.TailLogs(lifecycle_pb2.TailLogsRequest(run_id=RUN, rank=2)))
        assert "this node has 2 ranks, from 0; got 2" in str(error)
        status = await status_of(fleet, at.read_text())
        told = await stub.Shutdown(
            lifecycle_pb2.ShutdownRequest(run_id=RUN, incarnation=status.incarnation, reason="test"), timeout=5
        )
        assert told.limit.seconds == 10
        out, _ = await asyncio.wait_for(process.communicate(), 120)
        assert process.returncode == ExitCode.INTERRUPTED
        assert [Path(f"/proc/{r.pid}").exists() for r in status.ranks] == [False, False]
        said = [json.loads(line) for line in out.decode().splitlines() if line.startswith("{")]
        assert {line["rank"] for line in said if line["event"] == "pushed"} == {0, 1}, "and passed on whole"


async def test_an_engine_agent_ends_when_it_is_told_and_keeps_no_rank_s_output(tmp_path: Path) -> None:
    async with fleet_for_toys(tmp_path, engines=1) as fleet:
        view = await fleet.engine("e0")
        stub, life = lifecycle(fleet, view.endpoint), view.status.engine.incarnation
        code, _ = await refusal(stub.TailLogs(lifecycle_pb2.TailLogsRequest(run_id=RUN, rank=0)))
        assert code == grpc.StatusCode.UNIMPLEMENTED
        _, error = await refusal(stub.Shutdown(lifecycle_pb2.ShutdownRequest(run_id=RUN, incarnation="other")))
        assert error.reason == "WRONG_INCARNATION"
        answer = await stub.DumpStacks(lifecycle_pb2.DumpStacksRequest(run_id=RUN), timeout=60)
        [own] = answer.processes
        assert (own.name, own.pid) == ("engine agent of e0", os.getpid())
        assert "pytest" in traced(own.text or own.problem)
        await stub.Shutdown(lifecycle_pb2.ShutdownRequest(run_id=RUN, incarnation=life, reason="test"), timeout=60)
        assert await asyncio.wait_for(fleet.tasks.pop("e0"), 60) == ExitCode.OK


async def test_both_sides_say_which_torch_they_run_on(tmp_path: Path) -> None:
    async with fleet_for_toys(tmp_path, engines=1) as fleet, toy_trainer(fleet.address) as trainer:
        await ObedientRanks.start(trainer, push_timeout=LATE_SECONDS)
        view = await fleet.view()
        assert list(view.engines[0].software) == software((TORCH,)) == [f"torch {torch.__version__}"]
        assert list(view.trainers[0].software) == software((TORCH, MEGATRON))


# ---- deadlines ----------------------------------------------------------------------------------


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
        assert (await refusal(stub.ReportStacks(told, timeout=60)))[1].reason == "STALE_TERM"
        told.update_id = "no-such-update"
        assert (await refusal(stub.ReportStacks(told, timeout=60)))[1].reason == "UNKNOWN_UPDATE"
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


# ---- ranks that die or stand still --------------------------------------------------------------


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
