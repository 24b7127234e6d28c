"""A real vLLM engine beside its reference: weights trained a little, what it speaks, and whether that is right."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from controlplane.core.sampling import SamplingSettings
from engine_agent.engine import EngineFacts
from engine_agent.vllm.engine import VllmEngine
from tests.support.reference import Reference
from tests.support.staging import stage
from tests.support.tiny_engine import State

PROMPT = [5, 6, 7, 8, 9]
LONG_PROMPT = [(7 * i + 3) % 250 for i in range(80)]
TOLERANCE = 1e-4
"""fp32 here and there, other kernels."""
labels = itertools.count(1)


@dataclass
class Rig:
    """One engine for the whole module, the model it loaded, and its reference."""

    engine: VllmEngine
    facts: EngineFacts
    model: Path
    state: State
    reference: Reference
    failpoints: Path


@dataclass
class Sample:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: tuple[tuple[str, int, int], ...] = ()
    cached: int = 0
    finish_reason: str | None = None


async def push(engine: VllmEngine, state: State) -> str:
    """Quiesce, install, canary, resume; returns the label."""
    label = str(next(labels))
    await engine.quiesce()
    with stage(state, label) as staged:
        await engine.install(staged)
    await engine.canary()
    await engine.resume()
    return label


async def generate(
    engine: VllmEngine,
    count: int,
    *,
    prompt: list[int] = PROMPT,
    name: str | None = None,
    slow_seconds: float = 0.0,
    into: Sample | None = None,
) -> Sample:
    sample = into or Sample()
    sampling = SamplingSettings(max_tokens=count, temperature=0.0, ignore_eos=True)
    async for delta in engine.generate(name or f"request-{next(labels)}", prompt, sampling):
        assert len(delta.logprobs) == len(delta.token_ids)
        sample.tokens += delta.token_ids
        sample.logprobs += delta.logprobs
        sample.cached = max(sample.cached, delta.cached_prompt_tokens)
        sample.spans, sample.finish_reason = delta.engine_spans, delta.finish_reason
        await asyncio.sleep(slow_seconds)
    return sample


async def live(engine: VllmEngine, names: list[str], count: int) -> dict[str, asyncio.Task[Sample]]:
    """Requests that have spoken a few tokens each, and whose consumers lag behind the engine."""
    samples = [Sample() for _ in names]
    tasks = {
        name: asyncio.create_task(
            generate(engine, count, prompt=[*PROMPT, i], name=name, slow_seconds=0.01, into=samples[i])
        )
        for i, name in enumerate(names)
    }
    while not all(len(s.tokens) > 4 for s in samples):
        assert not any(t.done() for t in tasks.values()), "a request ended before all had begun"
        await asyncio.sleep(0.001)
    return tasks


def assert_speaks_as(rig: Rig, state: State, sample: Sample, prompt: list[int] = PROMPT) -> None:
    tokens, logprobs = rig.reference.greedy(state, prompt, len(sample.tokens))
    assert sample.tokens == tokens
    assert sample.logprobs == pytest.approx(logprobs, abs=TOLERANCE)
