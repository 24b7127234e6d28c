"""One engine of two data parallel cores, with real vLLM: both take each version, stand still, and are believed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from controlplane.core.errors import CanaryFailed, EngineDied, InstallFailed
from controlplane.core.sampling import SamplingSettings
from controlplane.failpoints import DIRECTORY_VARIABLE
from engine_agent.engine import EngineFacts
from engine_agent.vllm.engine import VllmEngine
from engine_agent.vllm.install import told_at_check
from tests.support.eventually import eventually
from tests.support.reference import Reference
from tests.support.staging import stage
from tests.support.tiny_engine import State, tiny_settings, trained
from tests.support.tiny_model import make_tiny_model
from tests.support.vllm_agent_process import MARK

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

CORES = 2
PROMPTS = [[5, 6, 7, 8, i] for i in range(6)]


@dataclass
class Rig:
    engine: VllmEngine
    facts: EngineFacts
    state: State
    reference: Reference
    failpoint: Path

    async def install(self, state: State, label: str) -> None:
        await self.engine.quiesce()
        with stage(state, label) as staged:
            await self.engine.install(staged)

    async def push(self, state: State, label: str) -> None:
        await self.install(state, label)
        await self.engine.canary()
        await self.engine.resume()

    async def speak(self, name: str, prompt: list[int], count: int = 8) -> tuple[list[int], Any]:
        sampling = SamplingSettings(max_tokens=count, temperature=0.0, ignore_eos=True)
        tokens: list[int] = []
        spans: Any = ()
        async for delta in self.engine.generate(name, prompt, sampling):
            tokens += delta.token_ids
            spans = delta.engine_spans
        return tokens, spans

    async def all_speak(self, name: str, count: int = 8) -> list[tuple[list[int], Any]]:
        """At once, so that both cores get some."""
        return await asyncio.gather(*(self.speak(f"{name}-{i}", p, count) for i, p in enumerate(PROMPTS)))

    @property
    def cores_at_work(self) -> int:
        return len(set(self.engine._core.llm.engine_core.reqs_in_flight.values()))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    from safetensors.torch import load_file

    model = make_tiny_model(tmp_path_factory.mktemp("model"), seed=0)
    points = tmp_path_factory.mktemp("failpoints")
    engine = VllmEngine(tiny_settings(model, data_parallel_size=CORES), "engine-0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DIRECTORY_VARIABLE, str(points))
        facts = await engine.start()
        state = load_file(model / "model.safetensors")
        yield Rig(engine, facts, state, Reference(model), points / "worker.install")
        await engine.shutdown()


async def test_the_inventory_has_the_workers_of_every_core(rig: Rig) -> None:
    assert rig.facts.world_size == CORES
    assert len(set(rig.facts.device_uuids)) == CORES
    assert len(rig.facts.pids) == 2 * CORES
    assert rig.facts.max_requests == (8 + 1) * CORES


async def test_each_of_three_updates_is_spoken_exactly_by_both_cores(rig: Rig) -> None:
    for seed in (1, 2, 3):
        state = trained(rig.state, seed)
        await rig.push(state, str(seed))
        speaking = asyncio.create_task(rig.all_speak(f"three-{seed}"))
        await eventually(lambda: rig.cores_at_work == CORES)
        for prompt, (tokens, spans) in zip(PROMPTS, await speaking, strict=True):
            assert tokens == rig.reference.greedy(state, prompt, 8)[0]
            assert spans == ((str(seed), 0, 8),)


async def test_inv11_requests_of_both_cores_have_their_borders_where_quiesce_counted_them(rig: Rig) -> None:
    before, after = trained(rig.state, 11), trained(rig.state, 12)
    await rig.push(before, "11")
    speaking = asyncio.create_task(rig.all_speak("border", 100))
    await eventually(lambda: rig.cores_at_work == CORES)
    await asyncio.sleep(0.2)
    live = await rig.engine.quiesce()
    assert await rig.engine.quiesce() == live
    await rig.install(after, "12")
    await rig.engine.resume()
    for i, (_, spans) in enumerate(await speaking):
        border = live.token_counts[f"border-{i}"]
        assert spans == (("11", 0, border), ("12", border, 100)) if border else (("12", 0, 100),)


async def test_inv4_one_worker_of_one_core_that_fails_makes_a_mixture_and_the_next_update_heals_it(rig: Rig) -> None:
    await rig.push(trained(rig.state, 21), "21")
    rig.failpoint.write_text("raise after=3")  # whoever comes first takes it
    with pytest.raises(InstallFailed, match=r"worker \d: Injected") as failure:
        await rig.install(trained(rig.state, 22), "22")
    assert failure.value.touched
    assert "worker 0" not in failure.value.cause or "worker 1" not in failure.value.cause
    healed = trained(rig.state, 23)
    await rig.push(healed, "23")
    for prompt, (tokens, _) in zip(PROMPTS, await rig.all_speak("healed"), strict=True):
        assert tokens == rig.reference.greedy(healed, prompt, 8)[0]


async def test_a_core_that_says_other_than_its_sibling_fails_the_canary(rig: Rig) -> None:
    """A fault that no worker reports: one core was given other weights behind the agent's back."""
    await rig.push(trained(rig.state, 31), "31")
    await rig.engine.quiesce()
    client = rig.engine._core.llm.engine_core
    with stage(trained(rig.state, 99), "32") as staged:
        for method, *args in (
            ("start_weight_update",),
            ("update_weights", told_at_check(staged)),
            ("update_weights", {"step": "install"}),
            ("finish_weight_update",),
        ):
            call = ("collective_rpc", method, None, tuple(args), None)
            await client._call_utility_async(*call, engine=client.core_engines[1])
    with pytest.raises(CanaryFailed, match="core 1 says other than core 0"):
        await rig.engine.canary()
    await rig.push(trained(rig.state, 33), "33")


@pytest.mark.asyncio(loop_scope="function")
async def test_l5_one_cores_death_is_the_engines_and_nothing_of_it_is_left(tmp_path: Path) -> None:
    model, before = make_tiny_model(tmp_path / "model", seed=0), own_processes()
    engine = VllmEngine(tiny_settings(model, data_parallel_size=CORES), "engine-1")
    facts = await engine.start()
    started = own_processes() - before
    assert started > set(facts.pids), "vLLM's process between the cores is one more"
    os.kill(facts.pids[-1], signal.SIGKILL)
    with pytest.raises(EngineDied):
        await asyncio.wait_for(probe_on(engine), 20)
    await engine.shutdown()
    await eventually(lambda: not any(map(lives, started)))


async def test_l5_an_agent_that_is_killed_leaves_no_process_not_even_that_between_the_cores(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", seed=0)
    command = [sys.executable, "-m", "tests.support.vllm_agent_process", str(model), str(tmp_path / "note"), str(CORES)]
    agent = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert agent.stdout is not None
    while not (await asyncio.wait_for(agent.stdout.readline(), 120)).startswith(MARK.encode()):
        pass
    family = {p.pid for p in psutil.Process(agent.pid).children(recursive=True)}
    assert len(family) > 2 * CORES
    agent.kill()
    await agent.wait()
    await eventually(lambda: not any(map(lives, family)))


async def probe_on(engine: VllmEngine) -> None:
    """vLLM notices a death within 0.1 s."""
    while True:
        await engine.probe()


def own_processes() -> set[int]:
    return {p.pid for p in psutil.Process().children(recursive=True) if "resource_tracker" not in str(p.cmdline())}


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
