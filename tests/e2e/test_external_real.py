"""A real vLLM API server that nobody of ours started serves three versions as a real rank pushed them; and what
becomes of it when the server is replaced, or another writes to it."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from controlplane.core.sampling import SamplingSettings
from engine_agent.daemon.agent import run_engine
from engine_agent.daemon.settings import EngineSettings
from engine_agent.engine import GenerationDelta
from engine_agent.external.engine import ExternalEngine, ExternalSettings
from tests.support.eventually import eventually
from tests.support.local_fleet import RUN, LocalFleet
from tests.support.ports import free_port
from tests.support.reference import Reference
from tests.support.samples import Span, greedy
from tests.support.staging import stage
from tests.support.tiny_model import make_tiny_model
from tests.support.told_rank import Order, weights
from tests.support.toy_trainer import RankProcess, toy_trainer
from tests.support.vllm_server import VllmServer
from weightplane.v1 import operator_pb2

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(540)]
PROMPT = [5, 6, 7, 8, 9]
COUNT = 12
LONG = 300
START_SECONDS = 240.0


@dataclass
class Rig:
    fleet: LocalFleet
    server: VllmServer
    rank: RankProcess
    model: Path

    async def push(self, seed: int) -> int:
        """The number under which it was committed."""
        ended = len(self.ends)
        assert self.rank.process.stdin is not None
        self.rank.process.stdin.write(json.dumps(asdict(Order(seed))).encode() + b"\n")
        await eventually(lambda: len(self.ends) > ended, within=90)
        assert self.ends[-1]["event"] == "pushed", self.ends[-1]
        return int(self.ends[-1]["number"])

    @property
    def ends(self) -> list[dict[str, Any]]:
        return [line for line in self.rank.lines if line["event"] in ("pushed", "failed")]

    async def says(self) -> tuple[list[int], list[Span]]:
        return await greedy(self.fleet, "e0", PROMPT, COUNT)

    def truth(self, seed: int) -> list[int]:
        """transformers' tokens."""
        return Reference(self.model).greedy(weights(self.model, Order(seed)), PROMPT, COUNT)[0]

    async def is_shut(self) -> bool:
        """By what the agent says itself, and by where the fleet sends requests."""
        return await self.fleet.applied("e0") is None and not (await self.view()).routable

    async def serves(self, number: int) -> bool:
        view = await self.view()
        return view.routable and view.status.applied.number == number

    async def view(self) -> operator_pb2.EngineView:
        return await self.fleet.engine("e0")

    async def label(self, new: str = "") -> str:
        """What the server shows, or is told by somebody else to show."""
        path, data = (
            ("/update_weight_version", json.dumps({"new_version": new}).encode()) if new else ("/weight_info", None)
        )
        request = urllib.request.Request(self.server.url + path, data, {"Content-Type": "application/json"})
        answer = await asyncio.to_thread(lambda: urllib.request.urlopen(request, timeout=20).read())
        return str(json.loads(answer).get("weight_version"))


@asynccontextmanager
async def rig_of(directory: Path) -> AsyncIterator[Rig]:
    model = make_tiny_model(directory / "model", 0)
    server = VllmServer(model, free_port(), directory / "server.log")
    fleet = LocalFleet(directory)
    checkpoints = directory / "checkpoints"
    try:
        await server.start()
        await fleet.start_coordinator(lease_ttl_seconds=20.0)
        external = ExternalSettings(server.url, model)
        settings = EngineSettings(
            "e0",
            fleet.address,
            RUN,
            state_dir=directory / "engines",
            backend="external",
            external=external,
            checkpoint_root=checkpoints,
        )
        fleet._start("e0", run_engine, settings)
        async with toy_trainer(fleet.address, checkpoint_root=checkpoints) as trainer:
            (rank,) = await trainer.run_ranks(["tests.support.told_rank", str(model)], world=1)
            await eventually(lambda: bool(rank.said("listening")), within=60)
            rig = Rig(fleet, server, rank, model)
            await eventually(lambda: _known(fleet), within=START_SECONDS)
            yield rig
    finally:
        await fleet.close()
        server.kill()


async def _known(fleet: LocalFleet) -> bool:
    return any(engine.known for engine in (await fleet.view()).engines)


async def test_three_pushes_are_served_as_pushed_and_a_server_that_was_replaced_or_written_is_caught_up(
    tmp_path: Path,
) -> None:
    async with rig_of(tmp_path) as rig:
        first = await rig.push(1)
        assert await rig.says() == (rig.truth(1), [(first, 0, COUNT)])
        assert (await rig.label()).startswith(f"{first}.")

        running = asyncio.create_task(greedy(rig.fleet, "e0", PROMPT, LONG))  # kept over the next install
        await asyncio.sleep(0)
        second = await rig.push(2)
        assert await rig.says() == (rig.truth(2), [(second, 0, COUNT)])
        tokens, spans = await running
        assert (len(tokens), {s[0] for s in spans} <= {first, second}) == (LONG, True)
        print("spans of the request that ran meanwhile:", spans)

        third = await rig.push(3)
        expected = (rig.truth(3), [(third, 0, COUNT)])
        assert await rig.says() == expected
        before = (await rig.view()).status.engine.incarnation

        rig.server.kill()
        await eventually(rig.is_shut, within=30)
        await rig.server.start()
        await eventually(lambda: rig.serves(third), within=60)
        assert await rig.says() == expected
        replaced = (await rig.view()).status.engine.incarnation
        assert replaced != before

        await rig.label(new=str(third))  # the very version that it holds, and yet none of this agent's
        await eventually(lambda: _another(rig, replaced), within=30)
        await eventually(lambda: rig.serves(third), within=60)
        assert await rig.says() == expected
        fourth = await rig.push(4)
        assert await rig.says() == (rig.truth(4), [(fourth, 0, COUNT)])
        assert await rig.fleet.stop("e0") == 0
        assert (await rig.label()).startswith(f"{fourth}.")  # left as it is, and paused


async def _another(rig: Rig, incarnation: str) -> bool:
    return (await rig.view()).status.engine.incarnation != incarnation


async def test_without_our_routes_in_it_a_server_ends_requests_at_an_install_and_serves_the_same(
    tmp_path: Path,
) -> None:
    model, other = make_tiny_model(tmp_path / "model", 0), make_tiny_model(tmp_path / "other", 1)
    server = VllmServer(model, free_port(), tmp_path / "server.log", {"VLLM_PLUGINS": None})
    engine = ExternalEngine(ExternalSettings(server.url, model), "e0")
    try:
        await server.start()
        await engine.start()
        for label, which in (("1", model), ("2", other)):
            await engine.quiesce()
            with stage(load_file(which / "model.safetensors"), label) as staged:
                await engine.install(staged)
            await engine.canary()
            await engine.resume()
            said = await collect(engine, f"r{label}", COUNT)
            expected = Reference(model).greedy(load_file(which / "model.safetensors"), PROMPT, COUNT)[0]
            assert [t for d in said for t in d.token_ids] == expected
        running: list[GenerationDelta] = []
        task = asyncio.create_task(collect(engine, "long", LONG, running))
        await eventually(lambda: len(running) > 5)
        assert (await engine.quiesce()).token_counts == {}
        await task
        count = sum(len(d.token_ids) for d in running)
        assert running[-1].finish_reason == "abort"
        assert running[-1].engine_spans == (("2", 0, count),)
    finally:
        await engine.shutdown()
        server.kill()


async def collect(
    engine: ExternalEngine, name: str, count: int, into: list[GenerationDelta] | None = None
) -> list[GenerationDelta]:
    found = [] if into is None else into
    async for delta in engine.generate(name, PROMPT, SamplingSettings(count, temperature=0.0, ignore_eos=True)):
        found.append(delta)
    return found
