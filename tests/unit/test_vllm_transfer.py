"""Steps of an install that come to a worker late, or from an agent that is gone."""

from __future__ import annotations

from typing import Any

from engine_agent.vllm.mapping import MappedChunks
from engine_agent.vllm.transfer import InitInfo, StepResult, UpdateInfo, WeightplaneTransferEngine


def worker_after_check(install_id: str) -> Any:
    """A worker's engine that checked and mapped a version, without a model."""
    engine: Any = WeightplaneTransferEngine.__new__(WeightplaneTransferEngine)
    engine.result, engine._streamed = StepResult(), None
    engine._init = InitInfo(["d0"], "ab", ["w"], ["F32"], [[1]], [])
    engine._update = UpdateInfo(step="check", layout_digest="ab", install_id=install_id)
    engine._chunks = MappedChunks([])
    return engine


def test_inv4_an_install_installs_what_its_own_check_staged_and_nothing_else() -> None:
    engine = worker_after_check("new")
    engine.receive_weights(UpdateInfo(step="install", install_id="old"))
    assert (engine.result.ok, engine.result.touched) == (False, False)
    assert "install old without its own check; new was checked last" in engine.result.cause


def test_inv4_an_install_without_a_check_touches_nothing() -> None:
    engine = worker_after_check("new")
    engine._drop_staged()
    engine.receive_weights(UpdateInfo(step="install", install_id="new"))
    assert (engine.result.ok, engine.result.touched) == (False, False)
