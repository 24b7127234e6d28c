"""The in-memory engine: honest about its device's memory, and about what it loaded."""

from __future__ import annotations

import hashlib

import pytest
import xxhash

from controlplane.core.errors import EngineDied
from controlplane.core.layout import content_digest
from controlplane.core.sampling import SamplingSettings
from engine_agent.memory_engine import MemoryEngine, MemorySettings, initial_tensors, token_of, weights_of

SETTINGS = MemorySettings(tensors={"b": (4,), "a": (2, 3)}, kv_bytes=100, seconds_per_token=0.001)
WEIGHT_BYTES = (4 + 6) * 4


async def asleep(level: int = 1) -> MemoryEngine:
    engine = MemoryEngine(SETTINGS, "e0")
    await engine.start()
    await engine.quiesce()
    await engine.sleep(level)
    return engine


async def test_it_accounts_for_its_devices_memory() -> None:
    engine = await asleep()
    sizes = [engine.device_bytes]
    for kv_cache in (False, True):
        await engine.wake(kv_cache=kv_cache)
        sizes.append(engine.device_bytes)
    assert sizes == [0, WEIGHT_BYTES, WEIGHT_BYTES + 100]


@pytest.mark.parametrize("kv_cache", [None, False])
async def test_it_dies_of_running_on_memory_that_it_does_not_have(kv_cache: bool | None) -> None:
    engine = await asleep()
    if kv_cache is not None:
        await engine.wake(kv_cache=kv_cache)
    with pytest.raises(EngineDied, match="kv, not resident"):
        await engine.resume()
    with pytest.raises(EngineDied):
        await engine.probe()


async def test_it_dies_of_being_put_to_sleep_while_it_steps() -> None:
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
