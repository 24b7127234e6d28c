"""Refusals and failures at the edges: ranks on several nodes, an install that does not end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from controlplane.core.errors import EngineDied, IncompatibleNode, InstallTimedOut
from controlplane.core.layout import Layout
from engine_agent.engine import StagedWeights
from engine_agent.vllm.engine import VllmEngine
from engine_agent.vllm.settings import VllmSettings
from trainer_agent.agent.outcome import update_failed
from trainer_agent.rank.spawn import RankPlace
from weightplane.v1 import fleet_pb2, version_pb2


def test_ranks_on_several_nodes_are_refused_with_both_numbers() -> None:
    with pytest.raises(IncompatibleNode) as refused:
        RankPlace.detect({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"})
    assert (refused.value.expected, refused.value.got) == ("4", "2")


async def test_inv4_an_install_past_its_limit_kills_the_engine_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the workers hold then nobody knows."""
    engine = VllmEngine(VllmSettings(model=Path("model"), install_timeout_seconds=0.02), "e0")
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


def test_P4_a_lost_engines_last_words_on_its_stream_are_told() -> None:
    lost = fleet_pb2.EngineOutcome(
        engine=version_pb2.EngineRef(engine_id="e0", incarnation="i"),
        required=True,
        lost=True,
        error_reason="PEER_LOST",
        error_message="a new incarnation took its place",
    )
    state = fleet_pb2.UpdateState(update_id="u", engines=[lost])
    error = update_failed(state, "e0 lost", {"e0": EngineDied("e0", "the kernel killed worker 3")})
    assert "a new incarnation took its place" in str(error)
    assert "ENGINE_DIED: e0: the engine's processes are gone: the kernel killed worker 3" in str(error)
