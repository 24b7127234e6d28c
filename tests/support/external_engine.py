"""An agent's engine at a server that it did not start: what is put into it, and what it says."""

from __future__ import annotations

from dataclasses import replace

import torch

from controlplane.core.sampling import SamplingSettings
from engine_agent.engine import GenerationDelta
from engine_agent.external.engine import ExternalEngine
from tests.support.staging import stage

STATE = {"a": torch.arange(8.0).reshape(4, 2), "b": torch.ones(3)}
SAMPLING = SamplingSettings(max_tokens=8)
FINISH = "/finish_weight_update"


def shorten(engine: ExternalEngine, **limits: float) -> None:
    """Other limits than those under which it was started, for what is never answered."""
    engine._settings = replace(engine._settings, **limits)  # type: ignore[arg-type]


async def put(engine: ExternalEngine, label: str) -> None:
    await engine.quiesce()
    with stage(STATE, label) as staged:
        await engine.install(staged)


async def consume(
    engine: ExternalEngine, name: str, into: list[GenerationDelta] | None = None
) -> list[GenerationDelta]:
    found = [] if into is None else into
    async for delta in engine.generate(name, [1, 2, 3], SAMPLING):
        found.append(delta)
    return found
