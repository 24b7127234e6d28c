"""Our sources have all that vLLM's own trainer engines ask of theirs."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer_agent.source import LayerwiseSource, ParamMeta, layerwise_groups
from trainer_agent.sources.iterable import IterableSource

pytestmark = pytest.mark.real

base: Any = pytest.importorskip("vllm.distributed.weight_transfer.base")
NAMES = ["embed", "layers.0.a", "layers.1.a", "norm", "head"]


def test_our_sources_have_every_method_of_vllms_with_the_same_parameters() -> None:
    theirs = {n: f for n, f in vars(base.WeightSource).items() if inspect.isfunction(f)}
    assert set(theirs) == {"metadata", "__iter__", "held_names", "groups", "iter_groups"}
    for name, function in theirs.items():
        ours = getattr(LayerwiseSource, name)
        assert list(inspect.signature(ours).parameters) == list(inspect.signature(function).parameters), name


def test_our_metadata_has_the_fields_of_vllms() -> None:
    theirs = list(inspect.signature(base.ParamMeta).parameters)
    assert list(ParamMeta._fields) == theirs


PARTS = st.lists(st.sampled_from(["layers", "0", "1", "10", "w", "experts"]), min_size=1, max_size=5).map(".".join)


@given(st.lists(PARTS, unique=True, max_size=30))
def test_our_groups_are_vllms(names: list[str]) -> None:
    assert layerwise_groups(names) == base.layerwise_groups(names)


def test_a_source_of_ours_iterates_in_vllms_own_way() -> None:
    tensors = {name: torch.randn(2) for name in NAMES}
    source = IterableSource(None, tensors.items)
    theirs = [(names, [t.tolist() for t in found]) for names, found in base.WeightSource.iter_groups(source)]
    ours = [(names, [t.tolist() for t in found]) for names, found in source.iter_groups()]
    assert theirs == ours
    assert base.WeightSource.groups(source) == source.groups()


def test_a_source_of_vllms_is_pushed_as_an_iterator() -> None:
    module = torch.nn.Linear(2, 3)
    theirs = base.ModuleSource(module)
    source = IterableSource(theirs.metadata(), lambda: theirs)
    assert [name for name, _ in source] == [m.name for m in source.metadata()] == ["weight", "bias"]
