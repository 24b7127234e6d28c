"""The engine port over real vLLM: what is installed is what is spoken, token by token."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from controlplane.core.errors import CanaryFailed, EngineDied, InstallFailed, InvalidRequest
from controlplane.core.sampling import SamplingSettings
from controlplane.failpoints import DIRECTORY_VARIABLE
from engine_agent.engine import LiveRequests, StagedWeights
from engine_agent.vllm.canary import DECODED_TOKENS, PROMPT_TOKENS
from engine_agent.vllm.engine import VllmEngine
from engine_agent.vllm.install import MIXTURE
from tests.support.reference import Reference
from tests.support.staging import layout_of, stage
from tests.support.tiny_engine import State, read_state, tiny_settings, trained
from tests.support.tiny_model import make_tiny_model
from tests.support.vllm_speech import (
    LONG_PROMPT,
    PROMPT,
    TOLERANCE,
    Rig,
    assert_speaks_as,
    generate,
    labels,
    live,
    push,
)

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    model = make_tiny_model(tmp_path_factory.mktemp("model"), seed=0)
    failpoints = tmp_path_factory.mktemp("failpoints")
    engine = VllmEngine(tiny_settings(model), "engine-0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DIRECTORY_VARIABLE, str(failpoints))
        facts = await engine.start()
        yield Rig(engine, facts, model, read_state(model), Reference(model), failpoints)
        await engine.shutdown()


@pytest.fixture
def failpoint(rig: Rig) -> Iterator[Path]:
    point = rig.failpoints / "worker.install"
    yield point
    point.unlink(missing_ok=True)


async def test_each_of_three_updates_is_spoken_exactly_tied_embedding_included(rig: Rig) -> None:
    for seed in (1, 2, 3):
        state = trained(rig.state, seed)
        label = await push(rig.engine, state)
        sample = await generate(rig.engine, 12)
        assert_speaks_as(rig, state, sample)
        assert sample.spans == ((label, 0, 12),)


async def test_an_updated_engine_equals_a_fresh_one_loaded_from_the_same_weights(rig: Rig, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = make_tiny_model(tmp_path / "fresh", seed=0)
    state = trained(rig.state, 7)
    save_file(dict(state), model / "model.safetensors", metadata={"format": "pt"})
    await push(rig.engine, state)
    updated = [await generate(rig.engine, 24, prompt=p) for p in (PROMPT, LONG_PROMPT)]
    fresh_engine = VllmEngine(tiny_settings(model), "engine-fresh")
    try:
        await fresh_engine.start()
        fresh = [await generate(fresh_engine, 24, prompt=p) for p in (PROMPT, LONG_PROMPT)]
    finally:
        await fresh_engine.shutdown()
    assert [s.tokens for s in updated] == [s.tokens for s in fresh]
    for ours, theirs in zip(updated, fresh, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)


async def test_a_kept_request_has_its_border_where_quiesce_counted_it(rig: Rig) -> None:
    """INV-11: and each token is what the weights of its own span say, the prefix computed anew."""
    before, after = trained(rig.state, 11), trained(rig.state, 12)
    old = await push(rig.engine, before)
    tasks = await live(rig.engine, ["kept-0", "kept-1", "kept-2"], count=120)
    seen = await rig.engine.quiesce()
    new = str(next(labels))
    with stage(after, new) as staged:
        await rig.engine.install(staged)
    await rig.engine.resume()
    for i, (name, task) in enumerate(tasks.items()):
        sample, border = await task, seen.token_counts[name]
        assert 0 < border < 120
        assert sample.spans == ((old, 0, border), (new, border, 120))
        prefix = [*PROMPT, i]
        scores = rig.reference.score(before, prefix, sample.tokens[:border])
        scores += rig.reference.score(after, [*prefix, *sample.tokens[:border]], sample.tokens[border:])
        assert sample.logprobs == pytest.approx(scores, abs=TOLERANCE)


async def test_quiesce_means_that_no_consumer_sees_another_token(rig: Rig) -> None:
    await push(rig.engine, rig.state)
    tasks = await live(rig.engine, ["still-0", "still-1"], count=150)
    first = await rig.engine.quiesce()
    await asyncio.gather(*(rig.engine.probe() for _ in range(5)))
    assert await rig.engine.quiesce() == first
    await rig.engine.resume()
    assert {len((await t).tokens) for t in tasks.values()} == {150}
    assert await rig.engine.quiesce() == LiveRequests({})
    await rig.engine.resume()


async def test_an_update_clears_the_prefix_cache(rig: Rig) -> None:
    """INV-1: nothing that is said after an update rests on what the old weights computed."""
    before, after = trained(rig.state, 21), trained(rig.state, 22)
    await push(rig.engine, before)
    await generate(rig.engine, 4, prompt=LONG_PROMPT)
    again = await generate(rig.engine, 4, prompt=LONG_PROMPT)
    await push(rig.engine, after)
    fresh = await generate(rig.engine, 8, prompt=LONG_PROMPT)
    assert (again.cached, fresh.cached) == (64, 0)
    assert_speaks_as(rig, after, fresh, LONG_PROMPT)


async def test_a_flush_leaves_no_prefix_of_before(rig: Rig) -> None:
    await push(rig.engine, rig.state)
    for cached in (0, 64):
        assert (await generate(rig.engine, 4, prompt=LONG_PROMPT)).cached == cached
    await rig.engine.quiesce()
    await rig.engine.clear_caches()
    await rig.engine.resume()
    assert (await generate(rig.engine, 4, prompt=LONG_PROMPT)).cached == 0


@pytest.mark.parametrize("after", [0, 3, 19])
async def test_an_install_that_fails_half_way_says_so_and_a_full_update_heals_it(
    rig: Rig, failpoint: Path, after: int
) -> None:
    """INV-4."""
    await push(rig.engine, trained(rig.state, 31))
    failpoint.write_text(f"raise after={after}")
    await rig.engine.quiesce()
    with stage(trained(rig.state, 32), "999") as staged, pytest.raises(InstallFailed) as failure:
        await rig.engine.install(staged)
    assert (failure.value.touched, failure.value.cause) == (True, "worker 0: Injected: failpoint worker.install")
    await rig.engine.resume()
    assert {label for label, _, _ in (await generate(rig.engine, 4)).spans} == {MIXTURE}
    healed = trained(rig.state, 33)
    label = await push(rig.engine, healed)
    sample = await generate(rig.engine, 12)
    assert_speaks_as(rig, healed, sample)
    assert sample.spans == ((label, 0, 12),)


def _cut_short(staged: StagedWeights) -> StagedWeights:
    (span,) = staged.chunks[""]
    return replace(staged, chunks={"": [replace(span, byte_count=span.byte_count + 4096)]})


def _absent(staged: StagedWeights) -> StagedWeights:
    (span,) = staged.chunks[""]
    return replace(staged, chunks={"": [replace(span, path=span.path + "-absent")]})


def _for_another_device(staged: StagedWeights) -> StagedWeights:
    return replace(staged, chunks={"another-device": staged.chunks[""]})


def _beyond_the_chunk(staged: StagedWeights) -> StagedWeights:
    last = replace(staged.placements[-1], offset=staged.placements[-1].offset + 64)
    return replace(staged, placements=[*staged.placements[:-1], last])


@pytest.mark.parametrize("spoil", [_cut_short, _absent, _for_another_device, _beyond_the_chunk])
async def test_staged_bytes_that_are_not_there_leave_the_old_version_speaking(rig: Rig, spoil: Any) -> None:
    """INV-4: refused before the first byte."""
    old = trained(rig.state, 41)
    label = await push(rig.engine, old)
    await rig.engine.quiesce()
    with stage(trained(rig.state, 42), "999") as staged, pytest.raises(InstallFailed) as failure:
        await rig.engine.install(spoil(staged))
    assert not failure.value.touched
    await rig.engine.resume()
    sample = await generate(rig.engine, 8)
    assert_speaks_as(rig, old, sample)
    assert sample.spans == ((label, 0, 8),)


def without_attention_of_layer_1(state: State) -> State:
    return {name: t for name, t in state.items() if ".layers.1.self_attn." not in name}


async def test_a_layout_that_misses_a_layer_is_refused_before_anything_is_touched(rig: Rig) -> None:
    """INV-1: vLLM itself would finish it and take the label."""
    state = trained(rig.state, 51)
    await push(rig.engine, state)
    await rig.engine.quiesce()
    partial = without_attention_of_layer_1(trained(rig.state, 52))
    with stage(partial, "999") as staged, pytest.raises(InstallFailed, match="missing") as failure:
        await rig.engine.install(staged)
    assert not failure.value.touched
    await rig.engine.resume()
    assert_speaks_as(rig, state, await generate(rig.engine, 12))


async def test_a_worker_misses_parameters_by_itself(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """INV-1: whatever the agent believed that the model needs."""
    await push(rig.engine, rig.state)
    lenient = replace(rig.facts.expected, optional=frozenset(rig.state))
    monkeypatch.setattr(rig.engine._installer, "expected", lenient)
    await rig.engine.quiesce()
    partial = without_attention_of_layer_1(trained(rig.state, 53))
    with stage(partial, "999") as staged, pytest.raises(InstallFailed, match="were not loaded") as failure:
        await rig.engine.install(staged)
    assert failure.value.touched
    await rig.engine.resume()
    healed = trained(rig.state, 54)
    await push(rig.engine, healed)
    assert_speaks_as(rig, healed, await generate(rig.engine, 12))


async def test_an_install_into_a_running_engine_is_refused(rig: Rig) -> None:
    """It would kill the engine core in the middle of a forward pass."""
    await push(rig.engine, rig.state)
    with stage(trained(rig.state, 55), "999") as staged, pytest.raises(InstallFailed, match="not quiesced") as failure:
        await rig.engine.install(staged)
    assert not failure.value.touched
    assert_speaks_as(rig, rig.state, await generate(rig.engine, 8))


async def test_weights_that_are_not_finite_fail_the_canary_and_leave_nothing_behind(rig: Rig) -> None:
    """NaN in a KV page would outlive its request, good weights and a cleared cache."""
    state = trained(rig.state, 61)
    ill = {name: t * math.nan if name.endswith("k_proj.weight") else t for name, t in state.items()}
    tasks = await live(rig.engine, ["ill-0"], count=100)
    with pytest.raises(CanaryFailed, match="not finite"):
        await push(rig.engine, ill)
    await push(rig.engine, state)
    await asyncio.gather(*tasks.values())
    for prompt in (PROMPT, LONG_PROMPT):
        assert_speaks_as(rig, state, await generate(rig.engine, 8, prompt=prompt), prompt)


async def test_the_canary_goes_before_kept_requests_that_fill_the_batch(rig: Rig) -> None:
    await push(rig.engine, rig.state)
    tasks = await live(rig.engine, [f"full-{i}" for i in range(9)], count=150)
    queued = [asyncio.create_task(generate(rig.engine, 8)) for _ in range(8)]
    await rig.engine.quiesce()
    report = await rig.engine.canary()
    assert len(report.tokens) == DECODED_TOKENS
    assert len(report.prompt_logprobs) == PROMPT_TOKENS - 1
    assert not any(t.done() for t in tasks.values()), "the canary waited for a place"
    await rig.engine.resume()
    await asyncio.gather(*tasks.values(), *queued)


async def test_two_canaries_of_one_version_say_the_same(rig: Rig) -> None:
    await push(rig.engine, trained(rig.state, 71))
    await rig.engine.quiesce()
    first, second = await rig.engine.canary(), await rig.engine.canary()
    assert first.tokens == second.tokens
    assert first.prompt_logprobs == pytest.approx(second.prompt_logprobs, abs=1e-6)
    await rig.engine.resume()


async def test_closing_the_iterator_aborts_the_request_in_the_engine(rig: Rig) -> None:
    await push(rig.engine, rig.state)
    sampling = SamplingSettings(max_tokens=200, temperature=0.0, ignore_eos=True)
    deltas = rig.engine.generate("closed", PROMPT, sampling)
    first = await anext(deltas)
    assert first.finish_reason is None
    await deltas.aclose()
    assert await rig.engine.quiesce() == LiveRequests({})
    await rig.engine.resume()
    assert (await generate(rig.engine, 4, name="closed")).finish_reason == "length"


async def test_a_request_made_while_quiesced_waits_and_speaks_the_new_version(rig: Rig) -> None:
    await push(rig.engine, trained(rig.state, 81))
    await rig.engine.quiesce()
    waiting = asyncio.create_task(generate(rig.engine, 8))
    new, state = str(next(labels)), trained(rig.state, 82)
    with stage(state, new) as staged:
        await rig.engine.install(staged)
    assert not waiting.done()
    await rig.engine.resume()
    sample = await waiting
    assert sample.spans == ((new, 0, 8),)
    assert_speaks_as(rig, state, sample)


async def sampled(rig: Rig, **fields: Any) -> tuple[list[int], str | None, str, tuple[tuple[str, int, int], ...]]:
    """Tokens, finish reason, stop reason, spans."""
    settings = SamplingSettings(**{"max_tokens": 24, "temperature": 0.0, "ignore_eos": True, **fields})
    deltas = [d async for d in rig.engine.generate(f"request-{next(labels)}", PROMPT, settings)]
    tokens = [token for delta in deltas for token in delta.token_ids]
    return tokens, deltas[-1].finish_reason, deltas[-1].stop_reason, deltas[-1].engine_spans


async def test_a_sample_ends_at_its_stop_token_unless_it_has_too_few_tokens(rig: Rig) -> None:
    label = await push(rig.engine, trained(rig.state, 83))
    whole, *_ = await sampled(rig)
    at = next(i for i in range(2, len(whole)) if whole[i] not in whole[:i])
    stop = whole[at]
    ended = await sampled(rig, stop_token_ids=(stop,))
    assert ended == (whole[: at + 1], "stop", str(stop), ((label, 0, at + 1),))
    later, *_ = await sampled(rig, stop_token_ids=(stop,), min_tokens=at + 2)
    assert (later[:at], len(later) > at + 1, stop in later[: at + 1]) == (whole[:at], True, False)


async def test_a_seed_draws_the_same_again_and_a_bias_is_felt(rig: Rig) -> None:
    await push(rig.engine, rig.state)
    drawn = [await sampled(rig, temperature=1.0, seed=seed) for seed in (5, 5, 6)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert (await sampled(rig, extra={"logit_bias": {"9": 1e4}}))[0] == [9] * 24


async def test_text_that_an_engine_without_a_tokenizer_cannot_look_for_is_refused_and_it_serves_on(rig: Rig) -> None:
    await push(rig.engine, rig.state)
    for extra in ({"stop": ["end"]}, {"bad_words": ["no"]}):
        with pytest.raises(InvalidRequest, match="no tokenizer loaded"):
            await sampled(rig, extra=extra)
    assert_speaks_as(rig, rig.state, await generate(rig.engine, 8))


async def test_a_request_id_that_is_running_is_refused(rig: Rig) -> None:
    await push(rig.engine, rig.state)
    tasks = await live(rig.engine, ["twice"], count=100)
    with pytest.raises(InvalidRequest, match="twice is running"):
        await generate(rig.engine, 4, name="twice")
    assert len((await tasks["twice"]).tokens) == 100


async def test_facts_say_what_an_update_must_cover(rig: Rig) -> None:
    rig.facts.expected.check(layout_of(rig.state))
    assert rig.facts.world_size == len(rig.facts.device_uuids) == 1
    assert (rig.facts.vocab_size, rig.facts.max_model_len) == (256, 256)
    assert rig.facts.capabilities == {"staged", "streaming", "rollback", "prefix_cache", "processed_logprobs"}
    assert len(rig.facts.pids) == 2


async def test_a_missing_model_is_an_engine_that_died_before_it_lived(tmp_path: Path) -> None:
    engine = VllmEngine(tiny_settings(tmp_path / "nowhere"), "engine-none")
    with pytest.raises(EngineDied, match="no such directory"):
        await engine.start()
    await engine.shutdown()
