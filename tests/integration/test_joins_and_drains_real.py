"""A third real vLLM engine joins in the middle of a training run, and another is drained and leaves; as processes.

Training and rollouts never stop; what is printed at the end are the seconds that it took.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

from controlplane.cli import engine_orders as orders
from controlplane.rollout.client import RolloutClient
from tests.support.eventually import eventually
from tests.support.local_fleet import RUN, LocalFleet
from tests.support.moving_fleet import moved_on, sample_on, served, serves
from tests.support.reference import Reference
from tests.support.samples import greedy
from tests.support.tiny_model import make_tiny_model
from tests.support.tiny_rank import TinyWeights
from tests.support.toy_rank import Script
from tests.support.toy_trainer import RankProcess, toy_trainer

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]

START_SECONDS = 200.0
STEP_SECONDS = 1.0
GAP_SECONDS = 30.0
"""Longest between two versions: a step, a push to engines on one busy machine, and no engine's start."""
PROMPT, COUNT = [5, 6, 7, 8, 9], 12


class Engine:
    """A `weightplane engine` with a real vLLM."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls, fleet: LocalFleet, name: str, model: Path) -> Engine:
        file = fleet.directory / f"{name}.toml"
        vllm = f'model = "{model}"\ndtype = "float32"\nmax_model_len = 256\nkv_cache_memory_bytes = {32 << 20}\n'
        file.write_text(
            f'engine_id = "{name}"\nrun_id = "{RUN}"\ncoordinator = "{fleet.address}"\n'
            f'state_dir = "{fleet.directory / "engines"}"\ncheckpoint_root = "{fleet.directory / "checkpoints"}"\n'
            f"[vllm]\n{vllm}"
        )
        command = ["-m", "controlplane.cli.main", "engine", "--die-with-parent", str(os.getpid())]
        words = [sys.executable, *command, "--config", str(file)]
        with (fleet.directory / f"{name}.log").open("ab") as log:
            return cls(await asyncio.create_subprocess_exec(*words, stdout=log, stderr=log))

    async def ended(self) -> int:
        return await asyncio.wait_for(self.process.wait(), 60)

    async def stop(self) -> None:
        with suppress(ProcessLookupError):
            self.process.terminate()
        await self.ended()


@dataclass
class Run:
    """Two engines, and a trainer that pushes other weights every second or so."""

    fleet: LocalFleet
    model: Path
    rank: RankProcess
    engines: dict[str, Engine]
    commits: list[float] = field(default_factory=list)
    """When each version was first seen served."""

    async def watch(self) -> None:
        last = 0
        while True:
            number = await served(self.fleet)
            if number > last:
                self.commits.append(time.monotonic())
                last = number
            await asyncio.sleep(0.1)

    @property
    def longest_gap(self) -> float:
        return max(later - earlier for earlier, later in pairwise([*self.commits, time.monotonic()]))

    async def join(self, name: str) -> float:
        """Seconds until it is routable."""
        began = time.monotonic()
        self.engines[name] = await Engine.start(self.fleet, name, self.model)
        await eventually(lambda: _known(self.fleet, name), within=START_SECONDS)
        await serves(self.fleet, name)
        return time.monotonic() - began

    async def says_what_was_pushed(self, name: str) -> int:
        """Its tokens are transformers' of the same version's weights, for a sample of one version. The version."""

        async def of_one_version() -> int:
            tokens, spans = await greedy(self.fleet, name, PROMPT, COUNT)
            assert len(spans) == 1, "an update came in between: again"
            version = spans[0][0]
            (step,) = [p["step"] for p in self.rank.said("pushed") if p["version"] == version] or [version]
            truth = Reference(self.model).greedy(TinyWeights(self.model).tensors_of(step), PROMPT, COUNT)[0]
            assert tokens == truth
            return version

        return await eventually(of_one_version, within=180)


async def _known(fleet: LocalFleet, *names: str) -> bool:
    return {e.status.engine.engine_id for e in (await fleet.view()).engines if e.known} >= set(names)


@asynccontextmanager
async def run_of(tmp_path: Path) -> AsyncIterator[Run]:
    model = make_tiny_model(tmp_path / "model", 1)
    fleet, engines = LocalFleet(tmp_path), dict[str, Engine]()
    try:
        await fleet.start_coordinator(lease_ttl_seconds=10.0)
        for name in ("e0", "e1"):
            engines[name] = await Engine.start(fleet, name, model)
        await eventually(lambda: _known(fleet, *engines), within=START_SECONDS)
        kept = {"checkpoint_root": tmp_path / "checkpoints", "checkpoint_keep": 3}
        async with toy_trainer(fleet.address, **kept) as trainer:
            script = Script(steps=10_000, pause_before_step=STEP_SECONDS)
            (rank,) = await trainer.run_ranks(["tests.support.tiny_rank", json.dumps(asdict(script)), str(model)], 1)
            yield Run(fleet, model, rank, engines)
    finally:
        for engine in engines.values():
            await engine.stop()
        await fleet.close()


async def test_l1_a_third_vllm_engine_joins_and_another_leaves_while_training_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with run_of(tmp_path) as run:
        await eventually(lambda: served(run.fleet), within=180)
        watching = asyncio.create_task(run.watch())
        seen: Counter[str] = Counter()
        async with RolloutClient(run.fleet.address) as rollouts:
            sampling = asyncio.create_task(sample_on(rollouts, seen))
            joined = await run.join("e2")
            await eventually(lambda: seen["e2"] > 0, within=30)
            version = await run.says_what_was_pushed("e2")
            began = time.monotonic()
            leaving = orders.Target(run.fleet.address, "e1", 5.0)
            await orders.drain(leaving, "operator", 60.0)
            drained = time.monotonic() - began
            await orders.shutdown(leaving, "there are enough", 60.0)
            assert await run.engines.pop("e1").ended() == 0
            left, samples = time.monotonic() - began, seen["e1"]
            await moved_on(run.fleet, 3)
            await run.says_what_was_pushed("e0")
            assert not sampling.done(), sampling
            sampling.cancel()
            with suppress(asyncio.CancelledError):
                await sampling
        watching.cancel()
        assert seen["e1"] == samples
        assert seen["e0"] > 0
        assert run.rank.said("failed") == []
        assert run.rank.process.returncode is None, "it trains on"
        assert run.longest_gap < GAP_SECONDS
        with capsys.disabled():
            print(
                f"\ne2 routable {joined:.1f} s after its start, at version {version}; e1 drained in {drained:.1f} s, "
                f"gone after {left:.1f} s; {len(run.commits)} versions, at most {run.longest_gap:.1f} s apart; "
                f"samples {dict(seen)}"
            )
