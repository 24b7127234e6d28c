"""The composite engine as it is inside a worker, between a fake model and a fake draft: no engine is started."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from controlplane import failpoints
from controlplane.core.layout import DRAFT_ONLY, DType, Layout, Target, TargetKind, TensorSpec, Tie
from engine_agent.engine import StagedWeights
from engine_agent.vllm.install import told_at_check, told_at_init
from tests.support.staging import stage

pytestmark = pytest.mark.real

BOTH = (Target(TargetKind.MODEL), Target(TargetKind.DRAFT))
LAYOUT = Layout(
    (
        TensorSpec("embed.weight", DType.F32, (6, 4), BOTH),
        TensorSpec("layer.weight", DType.F32, (4, 4)),
        TensorSpec("draft:layer.weight", DType.F32, (2, 4), DRAFT_ONLY),
        TensorSpec("draft:fc.weight", DType.F32, (4, 8), DRAFT_ONLY),
    ),
    (Tie("head.weight", "embed.weight"), Tie("draft:head.weight", "embed.weight")),
)


class Fake(nn.Module):
    """Loads as vLLM's models do: each parameter by its own loader; says what it loaded."""

    def __init__(self, **shapes: tuple[int, int]) -> None:
        super().__init__()
        for name, (rows, columns) in shapes.items():
            self.add_module(name, nn.Linear(columns, rows, bias=False))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        parameters, loaded = dict(self.named_parameters()), set()
        for name, tensor in weights:
            getattr(parameters[name], "weight_loader", default_weight_loader)(parameters[name], tensor)
            loaded.add(name)
        return loaded

    def values(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.named_parameters()}


class Worker:
    """What vLLM's worker does to its transfer engine in one session."""

    def __init__(self) -> None:
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

        from engine_agent.vllm.transfer import WeightplaneTransferEngine

        self._config = SimpleNamespace(
            hf_text_config=SimpleNamespace(tie_word_embeddings=False), quantization=None, dtype=torch.float32
        )
        parallel = SimpleNamespace(rank=0, world_size=1, data_parallel_index=0)
        everything = SimpleNamespace(parallel_config=parallel, model_config=self._config)
        self.model = Fake(embed=(6, 4), layer=(4, 4), head=(6, 4))
        self.draft = Fake(embed=(6, 4), layer=(2, 4), fc=(4, 8), head=(6, 4))
        for model in (self.model, self.draft):
            record_metadata_for_reloading(model)  # as vLLM's loader does when it has made a model
        self.engine = WeightplaneTransferEngine(None, everything, torch.device("cpu"), self.model)
        self._current: Callable[[], Any] = lambda: set_current_vllm_config(VllmConfig())

    def update(self, staged: StagedWeights, *, to_draft: bool = True) -> Any:
        """The session's result."""
        engine = self.engine
        with self._current():
            engine.init_transfer_engine(engine.parse_init_info(told_at_init(staged, ("CPU-0",))))
            if to_draft:
                engine.set_weight_update_target(self.draft, self._config)
            engine.start_weight_update()
            for step in (told_at_check(staged), {"step": "install"}):
                engine.receive_weights(engine.parse_update_info(step))
                if not engine.result.ok:
                    break
            engine.finish_weight_update()
            engine.reset_weight_update_target()
        return engine.result


@pytest.fixture(scope="module")
def worker() -> Worker:
    return Worker()


def filled(value: float, layout: Layout = LAYOUT) -> dict[str, torch.Tensor]:
    return {t.name: torch.full(t.shape, value + i) for i, t in enumerate(layout.tensors)}


def assert_hold(worker: Worker, value: float) -> None:
    state = filled(value)
    embed = state["embed.weight"]
    wanted_model = {"embed.weight": embed, "layer.weight": state["layer.weight"], "head.weight": embed}
    wanted_draft = {
        "embed.weight": embed,
        "layer.weight": state["draft:layer.weight"],
        "fc.weight": state["draft:fc.weight"],
        "head.weight": embed,
    }
    for model, wanted in ((worker.model, wanted_model), (worker.draft, wanted_draft)):
        assert model.values().keys() == wanted.keys()
        assert all(torch.equal(model.values()[name], tensor) for name, tensor in wanted.items())


def test_three_updates_reach_model_and_draft_one_tensor_naming_both(worker: Worker) -> None:
    for value in (1.0, 2.0, 3.0):
        with stage(filled(value), "1", layout=LAYOUT) as staged:
            result = worker.update(staged)
        assert (result.ok, result.cause, result.loaded) == (True, "", 4)
        assert_hold(worker, value)


@pytest.mark.parametrize("after", range(5))
def test_inv4_a_failure_in_either_says_that_it_touched_and_the_next_update_heals_both(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    monkeypatch.setenv(failpoints.DIRECTORY_VARIABLE, str(tmp_path))
    (tmp_path / "worker.install").write_text(f"raise after={after}")
    with stage(filled(5.0), "1", layout=LAYOUT) as staged:
        result = worker.update(staged)
    assert (result.ok, result.touched) == (False, True)
    with stage(filled(6.0), "1", layout=LAYOUT) as staged:
        assert worker.update(staged).ok
    assert_hold(worker, 6.0)


def test_inv1_a_draft_that_was_given_too_little_fails_the_update(worker: Worker) -> None:
    short = Layout(LAYOUT.tensors[:3], LAYOUT.ties)
    with stage(filled(7.0, short), "1", layout=short) as staged:
        result = worker.update(staged)
    assert (result.ok, result.touched) == (False, True)
    assert "fc.weight" in result.cause


@pytest.mark.parametrize("to_draft", [False, True])
def test_inv4_a_session_of_another_target_than_the_layouts_touches_nothing(worker: Worker, to_draft: bool) -> None:
    layout = Layout(tuple(t for t in LAYOUT.tensors if t.targets != DRAFT_ONLY)[1:]) if to_draft else LAYOUT
    with stage(filled(1.0), "1", layout=LAYOUT) as staged:
        worker.update(staged)
    with stage(filled(9.0, layout), "1", layout=layout) as staged:
        result = worker.update(staged, to_draft=to_draft)
    assert (result.ok, result.touched) == (False, False)
    assert_hold(worker, 1.0)
