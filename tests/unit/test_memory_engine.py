"""The in-memory engine: honest about its device's memory, and about what it loaded."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import xxhash

from controlplane import failpoints
from controlplane.core.errors import EngineDied, InstallFailed
from controlplane.core.layout import (
    DRAFT_ONLY,
    MODEL_ONLY,
    DType,
    Layout,
    Target,
    TargetKind,
    TensorSpec,
    content_digest,
)
from controlplane.core.sampling import SamplingSettings
from engine_agent.memory.engine import MemoryEngine, MemorySettings, initial_tensors, token_of, weights_of
from tests.support.staging import stage

SETTINGS = MemorySettings(tensors={"b": (4,), "a": (2, 3)}, kv_bytes=100, seconds_per_token=0.001)
WEIGHT_BYTES = (4 + 6) * 4


async def asleep(level: int = 1) -> MemoryEngine:
    engine = MemoryEngine(SETTINGS, "e0")
    await engine.start()
    await engine.quiesce()
    await engine.sleep(level)
    return engine


async def test_a_memory_engine_accounts_for_its_devices_memory() -> None:
    engine = await asleep()
    sizes = [engine.device_bytes]
    for kv_cache in (False, True):
        await engine.wake(kv_cache=kv_cache)
        sizes.append(engine.device_bytes)
    assert sizes == [0, WEIGHT_BYTES, WEIGHT_BYTES + 100]


@pytest.mark.parametrize("kv_cache", [None, False])
async def test_an_engine_dies_of_running_on_memory_that_it_does_not_have(kv_cache: bool | None) -> None:
    engine = await asleep()
    if kv_cache is not None:
        await engine.wake(kv_cache=kv_cache)
    with pytest.raises(EngineDied, match="kv, not resident"):
        await engine.resume()
    with pytest.raises(EngineDied):
        await engine.probe()


async def test_an_engine_dies_of_being_put_to_sleep_while_it_steps() -> None:
    engine = MemoryEngine(SETTINGS, "e0")
    await engine.start()
    sample = engine.generate("r", [1], SamplingSettings(max_tokens=1000))
    await anext(sample)
    with pytest.raises(EngineDied):
        await engine.sleep(1)
    with pytest.raises(EngineDied):
        await engine.probe()


async def test_what_it_serves_from_its_start_is_named_by_its_content() -> None:
    engine = MemoryEngine(SETTINGS, "e0", serve_initial=True)
    facts = await engine.start()
    loaded = initial_tensors(SETTINGS)
    assert facts.initial_digest == content_digest([xxhash.xxh3_64_digest(loaded[n]) for n in ("a", "b")])
    weights = weights_of({n: hashlib.sha256(data).digest() for n, data in loaded.items()})
    deltas = [d async for d in engine.generate("r", [1, 2], SamplingSettings(max_tokens=4))]
    assert [t for d in deltas for t in d.token_ids] == [token_of(weights, [1, 2], i, 256) for i in range(4)]
    assert deltas[-1].engine_spans == (("0", 0, 4),)


async def test_other_seeds_load_other_weights_and_who_does_not_serve_them_names_nothing() -> None:
    engines = [
        MemoryEngine(MemorySettings(seed=seed), "e0", serve_initial=serve)
        for seed, serve in ((1, True), (1, True), (2, True), (1, False))
    ]
    digests = [(await engine.start()).initial_digest for engine in engines]
    assert digests[0] == digests[1] != digests[2]
    assert digests[3] is None


# ---- a draft model beside the model ------------------------------------------------------------------------------

BOTH = (Target(TargetKind.MODEL), Target(TargetKind.DRAFT))
MODEL_TENSORS = (TensorSpec("a", DType.F32, (2,)), TensorSpec("b", DType.F32, (3,), BOTH))
DRAFTED = Layout((*MODEL_TENSORS, TensorSpec("draft:a", DType.F32, (5,), DRAFT_ONLY)))
UNDRAFTED = Layout(tuple(replace(t, targets=MODEL_ONLY) for t in MODEL_TENSORS))
DRAFTER = MemorySettings(tensors={"a": (2,), "b": (3,)}, draft_tensors={"a": (5,), "b": (3,)})


async def install(engine: MemoryEngine, layout: Layout, label: str) -> None:
    state = {t.name: torch.full(t.shape, float(label)) for t in layout.tensors}
    with stage(state, label, layout=layout) as staged:
        await engine.install(staged)


def drafts_of(label: str) -> bytes:
    whole = {"a": torch.full((5,), float(label)), "b": torch.full((3,), float(label))}
    return weights_of({n: hashlib.sha256(t.numpy().tobytes()).digest() for n, t in whole.items()})


async def test_its_draft_is_told_as_a_capability_and_counted_as_memory() -> None:
    engine = MemoryEngine(DRAFTER, "e0")
    facts = await engine.start()
    assert "draft" in facts.capabilities
    facts.expected.check(DRAFTED)
    assert engine.device_bytes == (2 + 3 + 5 + 3) * 4 + DRAFTER.kv_bytes
    assert "draft" not in (await MemoryEngine(SETTINGS, "e0").start()).capabilities


@pytest.mark.parametrize("after", range(3))
async def test_inv4_after_a_failure_no_update_without_the_draft_passes_for_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    monkeypatch.setenv(failpoints.DIRECTORY_VARIABLE, str(tmp_path))
    engine = MemoryEngine(DRAFTER, "e0")
    await engine.start()
    await engine.quiesce()
    await install(engine, DRAFTED, "1")
    (tmp_path / "worker.install").write_text(f"raise after={after}")
    with pytest.raises(InstallFailed, match="touched: True"):
        await install(engine, DRAFTED, "2")
    assert engine.draft_weights != drafts_of("1")
    with pytest.raises(InstallFailed, match=r"touched: False.*draft model is a mixture"):
        await install(engine, UNDRAFTED, "3")
    await install(engine, DRAFTED, "4")
    assert engine.draft_weights == drafts_of("4")
    await install(engine, UNDRAFTED, "5")
    assert engine.draft_weights == drafts_of("4")


async def test_p2_level_2_drops_the_draft_too() -> None:
    engine = MemoryEngine(DRAFTER, "e0")
    await engine.start()
    await engine.quiesce()
    await install(engine, DRAFTED, "1")
    await engine.sleep(2)
    await engine.wake(kv_cache=True)
    with pytest.raises(InstallFailed, match="touched: False"):
        await install(engine, UNDRAFTED, "2")
    await install(engine, DRAFTED, "3")
    assert engine.draft_weights == drafts_of("3")
