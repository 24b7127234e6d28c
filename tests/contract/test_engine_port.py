"""One suite for every engine: the in-memory one obeys what the real one obeys, or nothing is proven by it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from controlplane.core.engine_core import SLEEP
from controlplane.core.errors import InstallFailed, IpcNotPossible, UnsupportedByEngine
from controlplane.core.sampling import SamplingSettings
from controlplane.device_memory.ranges import ExportedProbe, ExportedRange
from controlplane.failpoints import DIRECTORY_VARIABLE
from engine_agent.engine import (
    CUDA_IPC,
    PROCESSED_LOGPROBS,
    Engine,
    EngineFacts,
    GenerationDelta,
    StagedPart,
    StagedWeights,
)
from engine_agent.memory.engine import MemoryEngine, MemorySettings
from tests.support.eventually import eventually
from tests.support.ports import free_port
from tests.support.staging import stage
from tests.support.tiny_model import make_tiny_model
from tests.support.vllm_server import VllmServer

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]
PROMPT = [5, 6, 7, 8, 9]


@dataclass
class Rig:
    """A started engine, and weights for it."""

    engine: Engine
    facts: EngineFacts
    states: tuple[Any, Any]
    """Two state dicts that the engine would accept."""
    failpoint: Path

    def stage(self, which: int, label: str) -> AbstractContextManager[StagedWeights]:
        return stage(self.states[which], label)

    async def put(self, which: int, label: str) -> None:
        await self.engine.quiesce()
        with self.stage(which, label) as staged:
            await self.engine.install(staged)
        await self.engine.canary()
        await self.engine.resume()


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[
        "memory",
        pytest.param("vllm", marks=pytest.mark.real),
        pytest.param("external", marks=[pytest.mark.real, pytest.mark.slow]),
    ],
)
async def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    failpoints = tmp_path_factory.mktemp("failpoints")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DIRECTORY_VARIABLE, str(failpoints))
        async with AsyncExitStack() as around:
            if request.param == "external":
                engine, states = await _external(tmp_path_factory.mktemp("model"), around)
            else:
                engine, states = _memory() if request.param == "memory" else _vllm(tmp_path_factory.mktemp("model"))
            facts = await engine.start()
            yield Rig(engine, facts, states, failpoints / "worker.install")
            await engine.shutdown()


def _memory() -> tuple[Engine, tuple[Any, Any]]:
    import torch

    shapes = {"a": (64, 8), "b": (5,)}
    states = [{n: torch.full(s, float(i)) for n, s in shapes.items()} for i in range(2)]
    return MemoryEngine(MemorySettings(tensors=shapes, seconds_per_token=0.002), "e0"), (states[0], states[1])


def _vllm(directory: Path) -> tuple[Engine, tuple[Any, Any]]:
    from safetensors.torch import load_file

    from engine_agent.vllm.engine import VllmEngine, VllmSettings

    models = [make_tiny_model(directory / str(seed), seed) for seed in range(2)]
    settings = VllmSettings(model=models[0], dtype="float32", max_model_len=512, kv_cache_memory_bytes=32 << 20)
    states = [load_file(m / "model.safetensors") for m in models]
    return VllmEngine(settings, "e0"), (states[0], states[1])


async def _external(directory: Path, around: AsyncExitStack) -> tuple[Engine, tuple[Any, Any]]:
    from safetensors.torch import load_file

    from engine_agent.external.engine import ExternalEngine, ExternalSettings

    models = [make_tiny_model(directory / str(seed), seed) for seed in range(2)]
    server = VllmServer(models[0], free_port(), directory / "server.log")
    around.callback(server.kill)
    await server.start()
    states = [load_file(m / "model.safetensors") for m in models]
    return ExternalEngine(ExternalSettings(server.url, models[0]), "e0"), (states[0], states[1])


async def collect(
    engine: Engine, request_id: str, max_tokens: int, deltas: list[GenerationDelta] | None = None
) -> list[GenerationDelta]:
    sampling = SamplingSettings(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    found = [] if deltas is None else deltas
    async for delta in engine.generate(request_id, PROMPT, sampling):
        found.append(delta)
    return found


def tokens(deltas: list[GenerationDelta]) -> list[int]:
    return [t for d in deltas for t in d.token_ids]


async def until(deltas: list[GenerationDelta], count: int) -> None:
    await eventually(lambda: len(tokens(deltas)) >= count, within=30)


async def test_facts_say_what_an_update_must_cover(rig: Rig) -> None:
    assert set(rig.facts.expected.shapes) - rig.facts.expected.optional == set(rig.states[0])
    assert len(rig.facts.device_uuids) == rig.facts.world_size
    assert rig.facts.capabilities >= {"staged", PROCESSED_LOGPROBS}


async def test_what_is_installed_is_what_speaks_and_it_speaks_the_same_again(rig: Rig) -> None:
    said = []
    for label, which in (("11", 0), ("12", 1), ("13", 0)):
        await rig.put(which, label)
        deltas = await collect(rig.engine, f"r{label}", 8)
        assert deltas[-1].engine_spans == ((label, 0, 8),)
        assert deltas[-1].finish_reason == "length"
        said.append(tokens(deltas))
    assert said[0] == said[2]
    assert said[0] != said[1]


async def test_each_token_has_its_logprob(rig: Rig) -> None:
    await rig.put(0, "21")
    for delta in await collect(rig.engine, "r21", 5):
        assert len(delta.logprobs) == len(delta.token_ids)
        assert all(p <= 0 for p in delta.logprobs)


async def test_nothing_is_handed_out_between_quiesce_and_resume_and_the_count_is_exact(rig: Rig) -> None:
    await rig.put(0, "31")
    deltas: list[GenerationDelta] = []
    running = asyncio.create_task(collect(rig.engine, "r31", 120, deltas))
    await until(deltas, 5)
    live = await rig.engine.quiesce()
    assert live.token_counts["r31"] == len(tokens(deltas))
    await asyncio.sleep(0.05)
    assert live.token_counts["r31"] == len(tokens(deltas))
    assert (await rig.engine.quiesce()).token_counts == live.token_counts
    await rig.engine.resume()
    assert len(tokens(await running)) == 120


async def test_inv11_a_kept_request_goes_on_under_the_new_label_from_the_quiesced_token(rig: Rig) -> None:
    await rig.put(0, "41")
    deltas: list[GenerationDelta] = []
    running = asyncio.create_task(collect(rig.engine, "r41", 120, deltas))
    await until(deltas, 5)
    border = (await rig.engine.quiesce()).token_counts["r41"]
    with rig.stage(1, "42") as staged:
        report = await rig.engine.install(staged)
    assert report.loaded_tensors > 0
    await rig.engine.resume()
    assert (await running)[-1].engine_spans == (("41", 0, border), ("42", border, 120))


async def test_a_kept_request_goes_on_the_same_after_the_caches_were_cleared(rig: Rig) -> None:
    await rig.put(0, "51")
    alone = tokens(await collect(rig.engine, "r51", 40))
    deltas: list[GenerationDelta] = []
    running = asyncio.create_task(collect(rig.engine, "r52", 40, deltas))
    await until(deltas, 5)
    live = await rig.engine.quiesce()
    await rig.engine.clear_caches()
    assert (await rig.engine.quiesce()).token_counts == live.token_counts
    await rig.engine.resume()
    ended = await running
    assert ended[-1].engine_spans == (("51", 0, 40),)
    assert tokens(ended) == alone


async def test_closing_the_iterator_aborts_the_request(rig: Rig) -> None:
    await rig.put(0, "51")
    deltas: list[GenerationDelta] = []
    running = asyncio.create_task(collect(rig.engine, "r51", 300, deltas))
    await until(deltas, 3)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert "r51" not in (await rig.engine.quiesce()).token_counts
    await rig.engine.resume()


async def test_inv4_a_failed_install_says_that_it_touched_and_a_full_one_heals_it(rig: Rig) -> None:
    await rig.put(1, "61")
    rig.failpoint.write_text("raise after=1")
    await rig.engine.quiesce()
    with rig.stage(0, "62") as staged, pytest.raises(InstallFailed) as failure:
        await rig.engine.install(staged)
    assert failure.value.touched
    await rig.put(0, "63")
    healed = tokens(await collect(rig.engine, "r63", 8))
    await rig.put(0, "64")
    assert healed == tokens(await collect(rig.engine, "r64", 8))


async def test_an_engine_without_device_memory_says_so_and_goes_on_as_it_was(rig: Rig) -> None:
    if CUDA_IPC in rig.facts.capabilities:
        pytest.skip("this one has")
    await rig.put(1, "71")
    before = tokens(await collect(rig.engine, "r71", 8))
    uuid = rig.facts.device_uuids[0]
    probe = ExportedProbe(ExportedRange(uuid, "x", b"h" * 64, 1024, 0, 512, str(torch.__version__)), b"c" * 8)
    with pytest.raises(IpcNotPossible):
        await rig.engine.open_exports([probe])
    await rig.engine.open_exports(())
    assert tokens(await collect(rig.engine, "r72", 8)) == before


async def put_in_parts(rig: Rig, which: int, label: str, count: int | None = None) -> None:
    """A streaming install, tensor by tensor, as far as `count`; each part's memory is written over once it was in."""
    with rig.stage(which, label) as staged:
        await rig.engine.begin_streaming(staged.layout, label)
        for i in range(len(staged.layout.tensors) if count is None else count):
            place, (span,) = staged.placements[i], staged.chunks[""]
            await rig.engine.install_part(StagedPart(staged.chunks, [i], [place]))
            overwrite(span.path, place.offset, staged.layout.tensors[i].byte_count)


def overwrite(path: str, offset: int, byte_count: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(b"\xa5" * byte_count)


async def test_inv12_a_streaming_install_comes_to_the_same_and_reads_no_part_after_its_call(rig: Rig) -> None:
    await rig.put(1, "81")
    staged = tokens(await collect(rig.engine, "r81", 8))
    await rig.put(0, "82")
    await rig.engine.quiesce()
    await put_in_parts(rig, 1, "83")
    report = await rig.engine.finish_streaming()
    assert report.loaded_tensors == len(rig.states[1])
    await rig.engine.canary()
    await rig.engine.resume()
    deltas = await collect(rig.engine, "r83", 8)
    assert tokens(deltas) == staged
    assert deltas[-1].engine_spans == (("83", 0, 8),)


async def test_inv4_a_streaming_install_that_was_given_up_is_healed_by_a_full_one_of_either_kind(rig: Rig) -> None:
    await rig.put(1, "91")
    expected = tokens(await collect(rig.engine, "r91", 8))
    await rig.engine.quiesce()
    await put_in_parts(rig, 0, "92", count=len(rig.states[0]) // 2)
    await rig.engine.abandon_streaming()
    await rig.engine.abandon_streaming()
    await rig.put(1, "93")
    assert tokens(await collect(rig.engine, "r93", 8)) == expected
    await rig.engine.quiesce()
    await put_in_parts(rig, 0, "94", count=1)
    await rig.engine.abandon_streaming()
    await put_in_parts(rig, 1, "95")
    await rig.engine.finish_streaming()
    await rig.engine.canary()
    await rig.engine.resume()
    assert tokens(await collect(rig.engine, "r95", 8)) == expected


async def test_inv4_a_part_that_fails_says_that_it_touched_and_a_finish_without_every_tensor_fails(rig: Rig) -> None:
    await rig.put(1, "101")
    await rig.engine.quiesce()
    rig.failpoint.write_text("raise after=1")
    with pytest.raises(InstallFailed) as failure:
        await put_in_parts(rig, 0, "102")
    assert failure.value.touched
    await rig.engine.abandon_streaming()
    await put_in_parts(rig, 0, "103", count=len(rig.states[0]) - 1)
    with pytest.raises(InstallFailed) as failure:
        await rig.engine.finish_streaming()
    assert failure.value.touched
    await rig.engine.abandon_streaming()
    await rig.put(0, "104")


async def test_a_canary_is_finite_and_repeats_itself(rig: Rig) -> None:
    await rig.put(0, "71")
    await rig.engine.quiesce()
    first, second = await rig.engine.canary(), await rig.engine.canary()
    assert first.tokens == second.tokens
    assert first.prompt_logprobs == pytest.approx(second.prompt_logprobs, abs=1e-5)
    await rig.engine.resume()
    await rig.engine.probe()


# ---- sleep: where the engine says that it can; else the call is refused and harms nothing -----------------------


@pytest.fixture
def sleeper(rig: Rig) -> Rig:
    if SLEEP not in rig.facts.capabilities:
        pytest.skip("this engine cannot sleep, and says so")
    return rig


async def test_an_engine_without_the_capability_refuses_to_sleep_and_serves_on(rig: Rig) -> None:
    if SLEEP in rig.facts.capabilities:
        pytest.skip("this engine can sleep")
    await rig.put(0, "81")
    before = tokens(await collect(rig.engine, "r81", 6))
    await rig.engine.quiesce()
    for level in (1, 2):
        with pytest.raises(UnsupportedByEngine):
            await rig.engine.sleep(level)
    with pytest.raises(UnsupportedByEngine):
        await rig.engine.wake(kv_cache=True)
    await rig.engine.resume()
    assert tokens(await collect(rig.engine, "r82", 6)) == before


async def test_p2_level_1_keeps_the_weights_and_a_request_goes_on_with_them(sleeper: Rig) -> None:
    await sleeper.put(0, "91")
    before = tokens(await collect(sleeper.engine, "r91", 6))
    deltas: list[GenerationDelta] = []
    running = asyncio.create_task(collect(sleeper.engine, "r92", 60, deltas))
    await until(deltas, 5)
    live = await sleeper.engine.quiesce()
    await sleeper.engine.sleep(1)
    assert (await sleeper.engine.quiesce()).token_counts == live.token_counts
    await sleeper.engine.probe()
    for kv_cache in (False, True, True):
        await sleeper.engine.wake(kv_cache=kv_cache)
        assert (await sleeper.engine.quiesce()).token_counts == live.token_counts
    await sleeper.engine.resume()
    assert (await running)[-1].engine_spans == (("91", 0, 60),)
    assert tokens(await collect(sleeper.engine, "r93", 6)) == before


async def test_p2_after_level_2_an_install_makes_the_weights_again(sleeper: Rig) -> None:
    await sleeper.put(0, "101")
    before = tokens(await collect(sleeper.engine, "r101", 6))
    await sleeper.engine.quiesce()
    for level in (1, 2):  # from one into the other
        await sleeper.engine.sleep(level)
    await sleeper.engine.wake(kv_cache=True)
    await sleeper.put(0, "102")
    deltas = await collect(sleeper.engine, "r102", 6)
    assert tokens(deltas) == before
    assert deltas[-1].engine_spans == (("102", 0, 6),)


async def test_p2_asleep_an_install_touches_nothing(sleeper: Rig) -> None:
    await sleeper.put(0, "111")
    before = tokens(await collect(sleeper.engine, "r111", 6))
    await sleeper.engine.quiesce()
    await sleeper.engine.sleep(1)
    with sleeper.stage(1, "112") as staged, pytest.raises(InstallFailed) as failure:
        await sleeper.engine.install(staged)
    assert not failure.value.touched
    await sleeper.engine.wake(kv_cache=True)
    await sleeper.engine.resume()
    deltas = await collect(sleeper.engine, "r112", 6)
    assert tokens(deltas) == before
    assert deltas[-1].engine_spans == (("111", 0, 6),)
