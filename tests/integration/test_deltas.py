"""Deltas from real ranks to engine agents: who holds the base gets what changed, everybody else everything, and all end
with the same bytes."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import xxhash

from controlplane.checkpoints import read_manifest
from controlplane.core.engine_update import Update
from controlplane.core.layout import content_digest
from controlplane.failpoints import DIRECTORY_VARIABLE
from engine_agent.life.kept_base import BaseKeeper
from engine_agent.memory.engine import token_of, weights_of
from engine_agent.receivers import Receiver
from tests.support.deltas_by_hand import Opened, spoil, staged_files, watch_opens
from tests.support.eventually import eventually
from tests.support.local_fleet import LocalFleet
from tests.support.obedient import ObedientRanks, Weights
from tests.support.toy_trainer import ToyTrainer, fleet_for_toys, segments, start_engine, toy_trainer

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Opened]:
    return watch_opens(monkeypatch)


@dataclass
class Job:
    """A fleet that is fed inline, its trainer, and what the weights should be."""

    fleet: LocalFleet
    trainer: ToyTrainer
    ranks: ObedientRanks
    weights: Weights

    async def learn(self, step: int, elements: int = 20, **how: Any) -> str:
        """A step and its push. How it ended, on every rank."""
        await self.fleet.settled()
        self.weights.learn(step, elements)
        return outcome(await self.ranks.all("learn_and_push", step=step, elements=elements, **how))

    async def applied(self, engine_id: str, number: int) -> bool:
        return await self.fleet.applied(engine_id) == number

    async def become(self, step: int) -> str:
        """Other weights altogether."""
        await self.fleet.settled()
        self.weights.become(step)
        return outcome(await self.ranks.all("push", step=step))

    async def agrees(self, *engine_ids: str) -> None:
        """Those engines hold just these weights, by their digest and by their bytes."""
        parts = {name: tensor.numpy().tobytes() for name, tensor in self.weights.tensors.items()}
        digest = content_digest([xxhash.xxh3_64_digest(p) for p in parts.values()])
        words = weights_of({name: hashlib.sha256(p).digest() for name, p in parts.items()})
        for engine_id in engine_ids:
            assert (await self.fleet.status(engine_id)).content_digest == digest
            tokens, _, _ = await self.fleet.generate(engine_id, 4)
            assert tokens == [token_of(words, [1, 2, 3], i, 256) for i in range(4)]


def outcome(answers: list[dict[str, Any]]) -> str:
    """The same on every rank."""
    (said,) = {a.get("status") or f"{a['reason']}: {a['text']}" for a in answers}
    return str(said)


@asynccontextmanager
async def job(
    directory: Path,
    *,
    keepers: tuple[str, ...] = ("e0", "e1"),
    others: tuple[str, ...] = (),
    world: int = 1,
    transport: str = "inline",
    **more: Any,
) -> AsyncIterator[Job]:
    """`keepers` are engines whose agents keep what they hold; `more` goes to the trainer agent."""
    async with fleet_for_toys(directory, engines=0, transport=transport) as fleet:
        for engine_id in (*keepers, *others):
            start_engine(fleet, engine_id, deltas=engine_id in keepers)
        await fleet.wait_for_engines(len(keepers) + len(others))
        async with toy_trainer(fleet.address, link_host="127.0.0.1", **more) as trainer:
            ranks = await ObedientRanks.start(trainer, world, deltas=True)
            yield Job(fleet, trainer, ranks, Weights())
            assert await ranks.leave() == [0] * world
    await eventually(lambda: segments() == [])
    assert staged_files() == []


@pytest.mark.parametrize("transport", ["inline", "broadcast"])
async def test_the_first_push_is_whole_and_the_next_ones_are_what_changed(
    tmp_path: Path, opened: list[Opened], transport: str
) -> None:
    async with job(tmp_path, transport=transport) as run:
        for step in (1, 2, 3):
            assert await run.learn(step) == "COMMITTED"
            await run.agrees("e0", "e1")
        assert sorted(opened[:2]) == [(1, "e0", None), (1, "e1", None)]
        assert sorted(opened[2:4]) == [(2, "e0", 1), (2, "e1", 1)]
        assert sorted(opened[4:]) == [(3, "e0", 2), (3, "e1", 2)]
        received = (await run.fleet.status("e0")).update.bytes_received
        assert received == 2 * 20 * 8


async def test_an_engine_that_started_anew_gets_everything_and_the_other_what_changed(
    tmp_path: Path, opened: list[Opened]
) -> None:
    async with job(tmp_path) as run:
        await run.learn(1)
        await run.fleet.stop("e1")
        start_engine(run.fleet, "e1", deltas=True)
        await run.fleet.wait_for_engines(2)
        assert await run.learn(2) == "COMMITTED"
        await run.agrees("e0")
        await eventually(lambda: run.applied("e1", 2))
        await run.agrees("e1")
        assert sorted(opened[2:]) == [(2, "e0", 1), (2, "e1", None)]


async def test_over_a_new_link_everything_goes_and_over_the_one_that_stays_what_changed(
    tmp_path: Path, opened: list[Opened]
) -> None:
    async with job(tmp_path, transport="broadcast") as run:
        await run.learn(1)
        await run.fleet.stop("e1")
        for step in (2, 3):
            assert await run.learn(step) == "COMMITTED"
            await run.agrees("e0")
        assert opened[2:] == [(2, "e0", None), (3, "e0", 2)]


async def test_a_mixed_fleet_ends_with_the_same_bytes(tmp_path: Path, opened: list[Opened]) -> None:
    async with job(tmp_path, keepers=("e0",), others=("e1",), world=2) as run:
        for step in (1, 2, 3):
            assert await run.learn(step) == "COMMITTED"
            await run.agrees("e0", "e1")
        assert [base for _, engine, base in opened if engine == "e0"] == [None, 1, 2]
        assert [base for _, engine, base in opened if engine == "e1"] == [None] * 3


async def test_m3_a_base_that_went_bad_is_refused_and_the_push_repeated_whole(
    tmp_path: Path, opened: list[Opened]
) -> None:
    async with job(tmp_path, keepers=("e0",)) as run:
        await run.learn(1)
        spoil(0)
        assert await run.learn(2) == "COMMITTED"
        await run.agrees("e0")
        assert opened[1:] == [(2, "e0", 1), (3, "e0", None)]
        assert await run.learn(3) == "COMMITTED"
        await run.agrees("e0")
        assert opened[3:] == [(4, "e0", 3)]


@pytest.mark.parametrize("transport", ["inline", "broadcast"])
async def test_inv5_a_base_that_an_agent_lost_is_refused_and_the_push_repeated_whole(
    tmp_path: Path, opened: list[Opened], monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    keepers: list[BaseKeeper] = []
    take = BaseKeeper.take

    def seen(keeper: BaseKeeper, update: Update, receiver: Receiver) -> bool:
        keepers.append(keeper)
        return take(keeper, update, receiver)

    monkeypatch.setattr(BaseKeeper, "take", seen)
    async with job(tmp_path, transport=transport) as run:
        await run.learn(1)
        keepers[0].close()
        assert await run.learn(2) == "COMMITTED"
        await run.agrees("e0", "e1")
        assert sorted(opened[2:4]) == [(2, "e0", 1), (2, "e1", 1)]
        assert {base for *_, base in opened[4:]} == {None}
        assert await run.learn(3) == "COMMITTED"
        await run.agrees("e0", "e1")
        assert [base for *_, base in opened[-2:]] == [opened[-3][0]] * 2


async def test_inv4_a_delta_that_was_aborted_costs_nothing_and_is_repeated_whole(
    tmp_path: Path, opened: list[Opened], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    async with job(tmp_path, keepers=("e0",)) as run:
        await run.learn(1)
        (tmp_path / "trainer.between_chunks").write_text("raise")
        assert await run.learn(2) == "COMMITTED"
        await run.agrees("e0")
        *aborted, repeated = opened[1:]
        # A stream may try again until it hears that its update is over.
        assert (set(aborted), repeated) == ({(2, "e0", 1)}, (3, "e0", None))
        assert await run.learn(3) == "COMMITTED"
        await run.agrees("e0")
        assert opened[-1] == (4, "e0", 3)


async def test_what_is_not_worth_a_delta_goes_whole(tmp_path: Path, opened: list[Opened]) -> None:
    async with job(tmp_path, keepers=("e0",)) as run:
        await run.learn(1)
        assert await run.become(7) == "COMMITTED"
        await run.agrees("e0")
        assert opened[1:] == [(2, "e0", None)]
        assert await run.learn(3) == "COMMITTED"
        await run.agrees("e0")
        assert opened[2:] == [(3, "e0", 2)]


async def test_a_step_that_changed_nothing_is_a_version_too(tmp_path: Path, opened: list[Opened]) -> None:
    async with job(tmp_path, keepers=("e0",)) as run:
        await run.learn(1)
        assert await run.learn(2, elements=0) == "COMMITTED"
        await run.agrees("e0")
        assert opened[1:] == [(2, "e0", 1)]
        assert (await run.fleet.applied("e0"), (await run.fleet.status("e0")).update.bytes_received) == (2, 0)


async def test_by_shared_memory_nothing_travels_and_no_delta_is_made(tmp_path: Path, opened: list[Opened]) -> None:
    async with fleet_for_toys(tmp_path, engines=0) as fleet:
        start_engine(fleet, "e0", deltas=True)
        await fleet.wait_for_engines(1)
        async with toy_trainer(fleet.address) as trainer:
            ranks = await ObedientRanks.start(trainer, 1, deltas=True)
            run = Job(fleet, trainer, ranks, Weights())
            for step in (1, 2):
                assert await run.learn(step) == "COMMITTED"
                await run.agrees("e0")
            assert [base for *_, base in opened] == [None, None]
            assert staged_files() == []
            await ranks.leave()
    await eventually(lambda: segments() == [])


async def test_a_version_whose_engines_all_got_a_delta_is_written_whole_to_its_checkpoint(
    tmp_path: Path, opened: list[Opened]
) -> None:
    root = tmp_path / "checkpoints"
    async with job(tmp_path, keepers=("e0",), checkpoint_root=root, checkpoint_every=1) as run:

        def kept(version: int, digest: bytes) -> bool:
            found = [read_manifest(root, p.name) for p in root.iterdir() if not p.name.startswith(".")]
            return (version, digest) in [(m.version.number, m.content_digest) for m in found]

        step, written = 0, False
        while step < 2 or not written:  # a version that is pushed while the one before is still published has none
            step += 1
            assert step < 20, "no version that came as a delta was written"
            assert await run.learn(step) == "COMMITTED"
            digest = (await run.fleet.status("e0")).content_digest
            with suppress(AssertionError):
                written = False
                written = bool(await eventually(partial(kept, step, digest), within=2.0))
        assert opened[:2] == [(1, "e0", None), (2, "e0", 1)]
        assert opened[-1] == (step, "e0", step - 1)


async def test_weights_that_change_once_they_were_read_change_neither_the_delta_nor_its_base(
    tmp_path: Path, opened: list[Opened]
) -> None:
    async with job(tmp_path, keepers=("e0",)) as run:
        await run.learn(1)
        await run.fleet.settled()
        await run.ranks.all("learn_and_push_async", step=2)
        run.weights.learn(2, 20)
        assert outcome(await run.ranks.all("applied", step=2)) == "COMMITTED"
        await run.agrees("e0")
        run.weights.learn(-2, 20)
        assert await run.learn(3) == "COMMITTED"
        await run.agrees("e0")
        assert opened[1:] == [(2, "e0", 1), (3, "e0", 2)]
