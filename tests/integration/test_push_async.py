"""`push_async` with real ranks: training goes on while engines install, and every rank hears how it ended."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from controlplane.exit_codes import ExitCode
from engine_agent.engine import InstallReport, StagedWeights
from engine_agent.life.engine_life import EngineLife
from engine_agent.memory.engine import MemoryEngine
from engine_agent.services import lifecycle_service
from tests.support.eventually import eventually
from tests.support.local_fleet import RUN
from tests.support.obedient import ObedientRanks
from tests.support.toy_trainer import fleet_for_toys, segments, start_engine, toy_trainer
from weightplane.v1 import engine_pb2, lifecycle_pb2, lifecycle_pb2_grpc

pytestmark = pytest.mark.timeout(400)


class Installs:
    """Every engine's install waits until the test lets it go."""

    def __init__(self) -> None:
        self.begun = 0
        self.go = asyncio.Event()


@pytest.fixture
def installs(monkeypatch: pytest.MonkeyPatch) -> Installs:
    held, install = Installs(), MemoryEngine.install

    async def when_let(engine: MemoryEngine, staged: StagedWeights) -> InstallReport:
        held.begun += 1
        await held.go.wait()
        return await install(engine, staged)

    monkeypatch.setattr(MemoryEngine, "install", when_let)
    return held


async def test_training_goes_on_while_engines_install_and_what_was_pushed_is_what_they_get(
    tmp_path: Path, installs: Installs
) -> None:
    async with fleet_for_toys(tmp_path) as fleet, toy_trainer(fleet.address) as trainer:
        ranks = await ObedientRanks.start(trainer)
        assert [a["event"] for a in await ranks.all("push_async", step=1)] == ["did", "did"]
        await eventually(lambda: installs.begun == 2)
        for step in (2, 3):
            assert [a["event"] for a in await ranks.all("train", step=step)] == ["did", "did"]

        async def seen() -> bool:
            return [t.status.step for t in (await fleet.view()).trainers] == [3]

        await eventually(seen)
        assert [a["done"] for a in await ranks.all("done", step=1)] == [False, False]
        assert await fleet.applied("e0") is None
        installs.go.set()
        heard = await ranks.all("applied", step=1)
        assert [(a["version"], a["status"], a["outcomes"]) for a in heard] == [
            (1, "COMMITTED", {"e0": "APPLIED", "e1": "APPLIED"})
        ] * 2
        pushed = (await fleet.status("e0")).content_digest
        await fleet.settled()
        [again, _] = await ranks.all("push", step=1)
        assert again["version"] == 2
        assert (await fleet.status("e0")).content_digest == pushed, "not what the weights became meanwhile"
        assert await ranks.leave() == [0, 0]
    await eventually(lambda: segments() == [])


@pytest.mark.parametrize(("transport", "before"), [("inline", True), ("broadcast", True), ("shared_memory", False)])
async def test_sent_bytes_leave_the_ranks_memory_free_before_engines_install_and_mapped_ones_do_not(
    tmp_path: Path, installs: Installs, transport: str, before: bool
) -> None:
    async with (
        fleet_for_toys(tmp_path, engines=1, transport=transport) as fleet,
        toy_trainer(fleet.address, link_host="127.0.0.1") as trainer,
    ):
        ranks = await ObedientRanks.start(trainer, world=1)
        await ranks.all("push_async", step=1)
        await eventually(lambda: installs.begun == 1)
        [answer] = await ranks.all("released", step=1, timeout=20.0 if before else 0.5)
        assert answer.get("reason") == (None if before else "DEADLINE_EXCEEDED")
        assert [a["done"] for a in await ranks.all("done", step=1)] == [False]
        installs.go.set()
        [answer] = await ranks.all("applied", step=1)
        assert answer["status"] == "COMMITTED"
        await ranks.all("released", step=1)


async def test_serving_is_told_when_an_engine_takes_requests_under_the_version(tmp_path: Path) -> None:
    async with fleet_for_toys(tmp_path) as fleet, toy_trainer(fleet.address) as trainer:
        ranks = await ObedientRanks.start(trainer)
        await ranks.all("push_async", step=1)
        for answer in await ranks.all("serving", step=1):
            assert answer["version"] == 1
            assert set(answer["serving"]) & {"e0", "e1"}
        routable = {e.status.engine.engine_id for e in (await fleet.view()).engines if e.routable}
        assert routable >= set(answer["serving"])
        for answer in await ranks.all("push", step=2, wait="serving", check=True):
            assert answer["version"] == 2
            assert answer["serving"]
        for answer in await ranks.all("push", step=3, wait="released"):
            assert (answer["version"], answer["status"]) == (3, "COMMITTED")


async def test_that_a_gate_opened_is_told_at_once_and_not_with_the_next_heartbeat(tmp_path: Path) -> None:
    slow = {"heartbeat_seconds": 60.0, "lease_ttl_seconds": 200.0}
    async with fleet_for_toys(tmp_path, engines=1, **slow) as fleet, toy_trainer(fleet.address) as trainer:
        ranks = await ObedientRanks.start(trainer, world=1)
        for step in (1, 2):
            await ranks.all("push_async", step=step)
            [answer] = await ranks.all("serving", step=step, timeout=45.0)
            assert answer.get("serving") == ["e0"], answer


async def test_a_version_that_no_gate_opens_for_is_applied_and_not_serving(tmp_path: Path) -> None:
    async with fleet_for_toys(tmp_path, engines=1) as fleet, toy_trainer(fleet.address) as trainer:
        ranks = await ObedientRanks.start(trainer, world=1)
        view = await fleet.engine("e0")
        lifecycle: Any = lifecycle_pb2_grpc.LifecycleStub(fleet.channel(view.endpoint))
        await lifecycle.PauseGeneration(
            lifecycle_pb2.PauseGenerationRequest(run_id=RUN, engine=view.status.engine, owner="test")
        )
        await ranks.all("push_async", step=1)
        [answer] = await ranks.all("applied", step=1)
        assert answer["outcomes"] == {"e0": "APPLIED"}
        [answer] = await ranks.all("serving", step=1, timeout=0.5)
        assert answer["reason"] == "DEADLINE_EXCEEDED"
        assert "serving: waited 0.5 s for an engine that serves 1.1" in answer["text"]
        await ranks.all("push_async", step=2)
        [answer] = await ranks.all("serving", step=1)
        assert answer["reason"] == "DEADLINE_EXCEEDED", "of a push before the latest nothing more is found out"


async def test_a_check_names_the_engine_that_holds_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = lifecycle_service.status_of

    def lies(life: EngineLife) -> engine_pb2.EngineStatus:
        status = true(life)
        if status.engine.engine_id == "e1":
            status.content_digest = b"\1" * 32
        return status

    async with fleet_for_toys(tmp_path) as fleet, toy_trainer(fleet.address) as trainer:
        ranks = await ObedientRanks.start(trainer)
        monkeypatch.setattr(lifecycle_service, "status_of", lies)
        for answer in await ranks.all("push", step=1, check=True):
            assert answer["reason"] == "CHECK_FAILED"
            differs = "1 of 2 engines do not hold it now: e1 holds other content (010101010101, not "
            assert differs in answer["text"]


async def test_the_ranks_agree_on_whether_they_wait(tmp_path: Path) -> None:
    async with fleet_for_toys(tmp_path) as fleet, toy_trainer(fleet.address) as trainer:
        ranks = await ObedientRanks.start(trainer)
        [detached, waiting] = await ranks.answers(ranks.tell(0, "push_async", step=1), ranks.tell(1, "push", step=1))
        assert (detached["event"], waiting["reason"]) == ("did", "SLOT_MISMATCH")
        assert "whether to wait for the push" in waiting["text"]
        assert "0: 'push_async', 1: 'push'" in waiting["text"]
        [told] = await ranks.answers(ranks.tell(0, "applied", step=1))
        assert told["reason"] == "SLOT_MISMATCH"
        assert [a["status"] for a in await ranks.all("push", step=2)] == ["COMMITTED"] * 2


async def test_a_second_push_waits_until_the_first_is_decided(tmp_path: Path, installs: Installs) -> None:
    async with fleet_for_toys(tmp_path, engines=1) as fleet, toy_trainer(fleet.address) as trainer:
        ranks = await ObedientRanks.start(trainer)
        await ranks.all("push_async", step=1)
        await eventually(lambda: installs.begun == 1)
        orders = [ranks.tell(i, "push_async", step=2) for i in range(2)]
        with pytest.raises(AssertionError):
            await eventually(lambda: any(ranks.answer(n) for n in orders), within=1)
        assert len((await fleet.view()).updates) == 1, "nothing of it was begun"
        installs.go.set()
        assert [a["event"] for a in await ranks.answers(*orders)] == ["did", "did"]
        versions = [[a["version"] for a in await ranks.all("applied", step=s)] for s in (1, 2)]
        assert versions == [[1, 1], [2, 2]]


async def test_a_push_that_nobody_waited_for_is_not_repeated_and_the_next_one_heals(
    tmp_path: Path, failpoint: Path
) -> None:
    async with fleet_for_toys(tmp_path, engines=1) as fleet, toy_trainer(fleet.address) as trainer:
        ranks = await ObedientRanks.start(trainer)
        (failpoint / "engine.between_chunks").write_text("raise after=2")
        assert [a["event"] for a in await ranks.all("push_async", step=1)] == ["did", "did"]
        for answer in await ranks.all("applied", step=1):
            assert answer["reason"] == "UPDATE_FAILED"
            assert "the next one brings whole weights to every engine" in answer["notes"][0]
        assert await fleet.applied("e0") is None
        await ranks.all("push_async", step=2)
        assert [a["outcomes"] for a in await ranks.all("applied", step=2)] == [{"e0": "APPLIED"}] * 2
        assert await fleet.applied("e0") == 2


async def test_engines_that_died_of_a_detached_push_are_waited_for_by_the_next_one(
    tmp_path: Path, failpoint: Path
) -> None:
    async with fleet_for_toys(tmp_path, engines=1) as fleet, toy_trainer(fleet.address) as trainer:
        ranks = await ObedientRanks.start(trainer)
        (failpoint / "engine.before_install").write_text("raise")
        await ranks.all("push_async", step=1)
        assert [a["reason"] for a in await ranks.all("applied", step=1)] == ["UPDATE_FAILED"] * 2
        assert [a["outcomes"] for a in await ranks.all("push", step=2)] == [{"e0": "APPLIED"}] * 2


async def test_inv_7_a_trainer_that_is_fenced_in_a_detached_push_hears_it_at_its_next_word(
    tmp_path: Path, installs: Installs
) -> None:
    async with fleet_for_toys(tmp_path, engines=1) as fleet, toy_trainer(fleet.address) as trainer:
        ranks = await ObedientRanks.start(trainer)
        await ranks.all("push_async", step=1)
        await eventually(lambda: installs.begun == 1)
        assert await fleet.take_lease(takeover=True, trainer_id="other") == 2
        await eventually(trainer.agent.refused_event.is_set)
        installs.go.set()
        assert [a["reason"] for a in await ranks.all("applied", step=1)] == ["STALE_TERM"] * 2
        assert [await r.code() for r in ranks.ranks] == [ExitCode.FENCED] * 2


async def test_a_forked_child_cannot_ask_for_its_parents_push_and_disturbs_nothing(
    tmp_path: Path, installs: Installs
) -> None:
    async with fleet_for_toys(tmp_path, engines=1) as fleet, toy_trainer(fleet.address) as trainer:
        ranks = await ObedientRanks.start(trainer)
        await ranks.all("push_async", step=1)
        await eventually(lambda: installs.begun == 1)
        for answer in await ranks.all("fork", step=1):
            assert "a forked child cannot use it" in answer["child"]
        installs.go.set()
        assert [a["outcomes"] for a in await ranks.all("applied", step=1)] == [{"e0": "APPLIED"}] * 2


async def test_a_trainer_that_ends_with_a_push_under_way_waits_for_its_decision(
    tmp_path: Path, installs: Installs
) -> None:
    async with fleet_for_toys(tmp_path, engines=1) as fleet, toy_trainer(fleet.address) as trainer:
        ranks = await ObedientRanks.start(trainer)
        await ranks.all("push_async", step=1)
        await eventually(lambda: installs.begun == 1)
        leaving = asyncio.create_task(ranks.leave())
        await eventually(lambda: all(r.process.stdin.is_closing() for r in ranks.ranks if r.process.stdin))
        assert not leaving.done()
        installs.go.set()
        assert await leaving == [0, 0]
        assert await fleet.applied("e0") == 1
    await eventually(lambda: segments() == [])


async def test_a_rank_killed_while_its_push_is_under_way_leaves_a_decided_update_and_no_memory(
    tmp_path: Path, installs: Installs
) -> None:
    async with fleet_for_toys(tmp_path, engines=0) as fleet, toy_trainer(fleet.address) as trainer:
        start_engine(fleet, "e0")
        await fleet.wait_for_engines(1)
        ranks = await ObedientRanks.start(trainer)
        await ranks.all("push_async", step=1)
        await eventually(lambda: installs.begun == 1)
        ranks.ranks[0].kill()
        await ranks.ranks[0].process.wait()
        installs.go.set()
        [answer] = await ranks.answers(ranks.tell(1, "applied", step=1))
        assert answer.get("reason", answer.get("status")) in ("PEER_LOST", "COMMITTED")
        assert (await fleet.applied("e0") == 1) == (answer["event"] == "did")
        [answer] = await ranks.answers(ranks.tell(1, "push", step=2))
        assert answer["reason"] == "PEER_LOST"
        ranks.ranks[1].kill()
        await eventually(lambda: segments() == [])
