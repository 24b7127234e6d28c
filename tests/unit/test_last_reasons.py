"""Refusals and failures at the edges: ranks on several nodes, an install that does not end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from controlplane.core.errors import IncompatibleNode, InstallTimedOut
from controlplane.core.layout import Layout
from engine_agent.engine import StagedWeights
from engine_agent.vllm.engine import VllmEngine
from engine_agent.vllm.settings import VllmSettings
from trainer_agent.rank.spawn import RankPlace


def test_ranks_on_several_nodes_are_refused_with_both_numbers() -> None:
    with pytest.raises(IncompatibleNode) as refused:
        RankPlace.detect({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"})
    assert (refused.value.expected, refused.value.got) == ("4", "2")


async def test_inv4_an_install_past_its_limit_kills_the_engine_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the workers hold then nobody knows."""
    engine = VllmEngine(VllmSettings(model=str(Path("model")), install_timeout_seconds=0.02), "e0")
    killed: list[bool] = []

    async def hang(staged: StagedWeights) -> Any:
        await asyncio.Event().wait()

    async def kill() -> None:
        killed.append(True)

    monkeypatch.setattr(VllmEngine, "_installer", SimpleNamespace(install=hang), raising=False)
    monkeypatch.setattr(engine, "_kill", kill)
    with pytest.raises(InstallTimedOut) as failed:
        await engine.install(StagedWeights(Layout(()), "7", {}, ()))
    assert (failed.value.version, failed.value.limit_seconds, killed) == ("7", 0.02, [True])
