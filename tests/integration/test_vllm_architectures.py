"""Updates of models that differ in architecture, tie and element type: each has its own packing in vLLM."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from safetensors.torch import load_file

from controlplane.core.layout import Layout, Tie
from controlplane.core.sampling import SamplingSettings
from engine_agent.vllm.engine import VllmEngine, VllmSettings
from tests.support.reference import Reference
from tests.support.staging import layout_of, stage
from tests.support.tiny_model import make_tiny_model

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(240),
]

PROMPT = [5, 6, 7, 8, 9]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
State = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    architecture: str
    tied: bool
    dtype: str


KINDS = [
    Kind("qwen2", tied=True, dtype="float32"),
    Kind("llama", tied=False, dtype="float32"),
    Kind("llama", tied=True, dtype="bfloat16"),
]


@dataclass
class Rig:
    kind: Kind
    engine: VllmEngine
    model: Path
    state: State


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS, ids=str)
async def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    kind: Kind = request.param
    model = make_tiny_model(
        tmp_path_factory.mktemp("model"), 0, architecture=kind.architecture, tied=kind.tied, dtype=kind.dtype
    )
    settings = VllmSettings(model, dtype=kind.dtype, max_model_len=256, kv_cache_memory_bytes=32 << 20)
    engine = VllmEngine(settings, "engine-0")
    await engine.start()
    yield Rig(kind, engine, model, load_file(model / "model.safetensors"))
    await engine.shutdown()


async def push(engine: VllmEngine, state: Mapping[str, Any], layout: Layout | None = None) -> None:
    await engine.quiesce()
    with stage(state, "1", layout=layout) as staged:
        await engine.install(staged)
    await engine.canary()
    await engine.resume()


async def speak(engine: VllmEngine) -> tuple[list[int], list[float]]:
    sampling = SamplingSettings(max_tokens=16, temperature=0.0, ignore_eos=True)
    deltas = [delta async for delta in engine.generate("request", PROMPT, sampling)]
    return [t for d in deltas for t in d.token_ids], [v for d in deltas for v in d.logprobs]


def trained(state: State) -> State:
    import torch

    generator = torch.Generator().manual_seed(5)
    return {n: t + (0.05 * torch.randn(t.shape, generator=generator)).to(t.dtype) for n, t in state.items()}


async def test_installing_what_was_loaded_restores_it_exactly(rig: Rig) -> None:
    await push(rig.engine, rig.state)
    first = await speak(rig.engine)
    await push(rig.engine, trained(rig.state))
    assert await speak(rig.engine) != first
    await push(rig.engine, rig.state)
    assert await speak(rig.engine) == first


async def test_trained_weights_are_spoken_as_the_reference_speaks_them(rig: Rig) -> None:
    if rig.kind.dtype != "float32":
        pytest.skip("two implementations agree only roughly in bfloat16")
    state = trained(rig.state)
    await push(rig.engine, state)
    tokens, logprobs = await speak(rig.engine)
    expected_tokens, expected_logprobs = Reference(rig.model).greedy(state, PROMPT, 16)
    assert tokens == expected_tokens
    assert logprobs == pytest.approx(expected_logprobs, abs=1e-4)


async def test_a_tie_of_the_layout_reaches_a_model_that_is_not_tied(rig: Rig) -> None:
    if rig.kind.tied or rig.kind.dtype != "float32":
        pytest.skip("only an untied model takes its head from the layout's tie")
    state = trained(rig.state)
    del state[HEAD]
    layout = Layout(layout_of(state).tensors, (Tie(HEAD, EMBEDDING),))
    await push(rig.engine, state, layout)
    spoken = await speak(rig.engine)
    whole = state | {HEAD: state[EMBEDDING]}
    tokens, logprobs = Reference(rig.model).greedy(whole, PROMPT, 16)
    assert spoken[0] == tokens
    assert spoken[1] == pytest.approx(logprobs, abs=1e-4)
