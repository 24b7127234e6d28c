"""A tied head on a CPU multiplies by a packed copy: after a load it is of the new weights, and packed once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_agent.vllm.loading import Loader


class Packs:
    """As vLLM's method: the layer multiplies by a copy of its weight as it is now."""

    def __init__(self) -> None:
        self.count = 0

    def process_weights_after_loading(self, layer: Any) -> None:
        self.count += 1
        packed = layer.weight.detach().clone()
        layer.cpu_linear = lambda x: x @ packed.t()


class Model(torch.nn.Module):
    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(4, 3)
        self.lm_head: Any = torch.nn.Linear(3, 4, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight
        self.method = Packs()
        layers: tuple[Any, ...] = (self.embed, self.lm_head)
        for layer in layers:
            layer.quant_method = self.method
            self.method.process_weights_after_loading(layer)
        self.method.count = 0

    def install(self, value: float, *, packs: bool = True) -> None:
        """What the layerwise reload does of it: the head is left as it was."""
        with torch.no_grad():
            self.embed.weight.fill_(value)
        if packs:
            self.method.process_weights_after_loading(self.embed)

    def says(self) -> float:
        return float(self.lm_head.cpu_linear(torch.ones(1, 3))[0, 0])


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A load of a model that was begun."""

    def begin(model: Model) -> Loader:
        loader = Loader(model, SimpleNamespace(hf_text_config=SimpleNamespace(tie_word_embeddings=True)))
        loader.note_packed()
        return loader

    monkeypatch.setattr("engine_agent.vllm.loading.current_platform.is_cpu", lambda: True)
    return begin


def test_the_head_takes_the_copy_that_the_reload_packed_of_the_embedding(opened: Any) -> None:
    model = Model()
    for value in (2.0, 3.0):
        loader = opened(model)
        model.install(value)
        loader.repair_tied_head()
        assert model.says() == 3 * value
    assert model.method.count == 2, "once for each load: by the reload itself"


def test_where_the_reload_packs_no_embedding_the_head_packs_its_own(opened: Any) -> None:
    model = Model()
    loader = opened(model)
    model.install(2.0, packs=False)
    loader.repair_tied_head()
    assert model.says() == 6.0


def test_a_head_with_memory_of_its_own_packs_that(opened: Any) -> None:
    model = Model(tied=False)
    loader = opened(model)
    model.install(2.0)
    with torch.no_grad():
        model.lm_head.weight.fill_(5.0)
    loader.repair_tied_head()
    assert model.says() == 15.0
