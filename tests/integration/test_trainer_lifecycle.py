"""`Lifecycle` of trainer agents and engine agents: status, end, the ranks' output, stacks."""

from __future__ import annotations

import asyncio
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from controlplane.exit_codes import ExitCode
from controlplane.rpc.errors import from_rpc_error
from controlplane.software import MEGATRON, TORCH, software
from tests.support.command_line import weightplane
from tests.support.eventually import eventually
from tests.support.lifecycle_calls import address_of, lifecycle, status_of, traced
from tests.support.local_fleet import RUN, LocalFleet
from tests.support.obedient import ObedientRanks
from tests.support.refusals import refusal, rpc_error_of
from tests.support.toy_rank import Script
from tests.support.toy_trainer import fleet_for_toys, toy_trainer
from tests.support.trainer_process import TOY, start_python
from weightplane.v1 import lifecycle_pb2

pytestmark = pytest.mark.timeout(400)

LATE_SECONDS = 120.0
"""Of a push that does not end; what is before the standing still takes less on a busy machine too."""
TOLD_SECONDS = 5.0
"""What is told at once takes milliseconds; more only where the machine is busy."""


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
            raised = await rpc_error_of(call)
            error = from_rpc_error(raised)
            assert (raised.code(), error.reason) == (grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED_BY_ENGINE")
            assert "trainer agent toy" in str(error)
        error = await refusal(stub.GetStatus(lifecycle_pb2.GetStatusRequest(run_id="other")))
        assert error.reason == "WRONG_RUN"
        error = await refusal(stub.Shutdown(lifecycle_pb2.ShutdownRequest(run_id=RUN, incarnation="other")))
        assert error.reason == "WRONG_INCARNATION"
        life = (await status_of(fleet, address_of(trainer))).incarnation
        error = await refusal(stub.Shutdown(lifecycle_pb2.ShutdownRequest(run_id=RUN, incarnation=life)))
        assert "its ranks are their launcher's to end" in str(error)
        error = await refusal(stub.DumpStacks(lifecycle_pb2.DumpStacksRequest(run_id=RUN, ranks=[0, 7])))
        assert "ranks [7] are not there; there are [0]" in str(error)


async def launched(fleet: LocalFleet, at: Path, script: Script) -> asyncio.subprocess.Process:
    """A trainer agent with two ranks, as a process; its address comes to `at`."""
    code = (
        "import asyncio, sys; from pathlib import Path;"
        "from trainer_agent.agent import TrainerSettings, run_trainer;"
        f"settings = TrainerSettings(coordinator={fleet.address!r}, nproc_per_node=2, max_restarts=3,"
        f" stop_seconds=10.0, address_file=Path({str(at)!r}));"
        f"sys.exit(asyncio.run(run_trainer(settings, [{str(TOY)!r}, {json.dumps(asdict(script))!r}])))"
    )
    return await start_python(["-c", code], {})


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
        error = await refusal(stub.TailLogs(lifecycle_pb2.TailLogsRequest(run_id=RUN, rank=2)))
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
        raised = await rpc_error_of(stub.TailLogs(lifecycle_pb2.TailLogsRequest(run_id=RUN, rank=0)))
        assert raised.code() == grpc.StatusCode.UNIMPLEMENTED
        error = await refusal(stub.Shutdown(lifecycle_pb2.ShutdownRequest(run_id=RUN, incarnation="other")))
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
