"""Speculative decoding with real vLLM: one update brings the model and its draft, and the tokens are the model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from controlplane.core.errors import InstallFailed
from controlplane.core.layout import DRAFT_ONLY, DRAFT_PREFIX, DType, Layout, TensorSpec
from controlplane.core.sampling import SamplingSettings
from controlplane.failpoints import DIRECTORY_VARIABLE
from engine_agent.engine import DRAFT
from engine_agent.vllm.engine import VllmEngine, VllmSettings
from tests.support.reference import Reference
from tests.support.staging import layout_of, stage
from tests.support.tiny_engine import State, tiny_settings, trained
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(240)]

PROMPT = [5, 6, 7, 8, 9]
COUNT = 24
PROPOSED = 2
"""Tokens of the draft for each of the model."""


async def install(engine: VllmEngine, model: State, draft: State | None, label: str) -> None:
    """The draft is another model of the same names."""
    tensors, drafted = dict(model), draft or {}
    specs = list(layout_of(model).tensors)
    for name, tensor in drafted.items():
        tensors[DRAFT_PREFIX + name] = tensor
        specs.append(TensorSpec(DRAFT_PREFIX + name, DType.F32, tuple(tensor.shape), DRAFT_ONLY))
    await engine.quiesce()
    with stage(tensors, label, layout=Layout(tuple(specs))) as staged:
        await engine.install(staged)
    await engine.canary()
    await engine.resume()


async def speak(engine: VllmEngine, name: str) -> tuple[list[int], Any, int]:
    """Tokens, spans, and in how many steps they came."""
    steps = 0
    tokens: list[int] = []
    spans: Any = ()
    async for delta in engine.generate(
        name, PROMPT, SamplingSettings(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
    ):
        tokens += delta.token_ids
        spans = delta.engine_spans
        steps += bool(delta.token_ids)
    return tokens, spans, steps


def with_draft(model: Path, draft: Path) -> VllmSettings:
    speculative = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": PROPOSED}
    return tiny_settings(model, vllm_arguments={"speculative_config": speculative})


async def test_model_and_draft_are_updated_together_and_a_failure_in_the_draft_is_healed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file

    model, draft = (make_tiny_model(tmp_path / name, seed=seed) for seed, name in enumerate(("model", "draft")))
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    state, reference = load_file(model / "model.safetensors"), Reference(model)
    engine = VllmEngine(with_draft(model, draft), "engine-0")
    try:
        facts = await engine.start()
        assert DRAFT in facts.capabilities
        for seed in (1, 2, 3):
            fresh = trained(state, seed)
            await install(engine, fresh, fresh, str(seed))
            tokens, spans, steps = await speak(engine, f"r{seed}")
            assert tokens == reference.greedy(fresh, PROMPT, COUNT)[0]
            assert spans == ((str(seed), 0, COUNT),)
            assert steps <= COUNT // (1 + PROPOSED) + 2  # a draft that is the model is right nearly always
        fresh = trained(state, 4)
        (tmp_path / "worker.install").write_text(f"raise after={len(state) + 3}")  # in the draft
        with pytest.raises(InstallFailed, match="touched: True"):
            await install(engine, fresh, fresh, "4")
        with pytest.raises(InstallFailed, match=r"touched: False.*draft model is a mixture"):
            await install(engine, fresh, None, "5")
        await install(engine, fresh, fresh, "6")
        assert (await speak(engine, "r6"))[0] == reference.greedy(fresh, PROMPT, COUNT)[0]
        await install(engine, trained(state, 7), None, "7")
        tokens, _, steps = await speak(engine, "r7")
        assert tokens == reference.greedy(trained(state, 7), PROMPT, COUNT)[0]
        assert steps > COUNT // (1 + PROPOSED) + 2  # an old draft costs speed only
    finally:
        await engine.shutdown()
