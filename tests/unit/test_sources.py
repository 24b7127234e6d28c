"""Sources for any module and any iterator: what they state, what they yield, and what they refuse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from controlplane.core.errors import LayoutInvalid
from trainer_agent.chunking import plan_segment
from trainer_agent.rank.exporter import Exporter, layout_of
from trainer_agent.rank.memory import WholeMemory
from trainer_agent.source import LayerwiseSource, ParamMeta, WeightSource, layerwise_groups
from trainer_agent.sources.iterable import IterableSource
from trainer_agent.sources.module import ModuleSource
from trainer_agent.sources.with_draft import WithDraft


class Tiny(nn.Module):
    """An embedding, two layers, a norm, a head that is the embedding if `tied`, and a buffer."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(10, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 10, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("positions", torch.arange(3))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))  # type: ignore[no-any-return]


def export(source: WeightSource) -> bytearray:
    """All of it into memory, as a push does."""
    layout = layout_of(source)
    plan = plan_segment(layout)
    memory = bytearray(max(plan.byte_count, 1))
    list(Exporter(layout, plan, WholeMemory(plan, memoryview(memory))).chunks(iter(source)))
    return memory


# ---- any module ----


def test_a_modules_parameters_are_yielded_under_its_own_names_and_buffers_are_not() -> None:
    module = Tiny()
    source = ModuleSource(module)
    yielded = dict(source)
    assert list(yielded) == [name for name, _ in module.named_parameters()]
    assert all(torch.equal(tensor, module.get_parameter(name)) for name, tensor in yielded.items())
    assert source.metadata() == [ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in yielded.items()]
    assert "positions" not in yielded
    assert not any(tensor.requires_grad for tensor in yielded.values())


def test_each_pass_yields_what_the_parameters_are_then() -> None:
    module = Tiny()
    source = ModuleSource(module)
    before = source.metadata()
    with torch.no_grad():
        module.norm.weight.fill_(5)
    module.norm.bias = nn.Parameter(torch.full((6,), 7.0))
    yielded = dict(source)
    assert yielded["norm.weight"].tolist() == [5.0] * 6
    assert yielded["norm.bias"].tolist() == [7.0] * 6
    assert source.metadata() == before


def test_names_are_renamed_and_those_without_a_name_are_not_sent() -> None:
    source = ModuleSource(Tiny(), names=lambda name: None if name.startswith("norm") else f"model.{name}")
    names = [name for name, _ in source]
    assert names == [m.name for m in source.metadata()]
    assert "model.layers.0.weight" in names
    assert not any("norm" in name for name in names)


def test_a_shared_parameter_is_one_tensor_and_a_tie() -> None:
    source = ModuleSource(Tiny(tied=True))
    assert source.ties() == [("head.weight", "embed.weight")]
    assert "head.weight" not in dict(source)
    assert [(t.alias, t.source) for t in layout_of(source).ties] == [("head.weight", "embed.weight")]


def test_two_parameters_over_one_memory_are_a_tie_and_parts_of_one_memory_are_not() -> None:
    module = Tiny()
    module.head.weight = nn.Parameter(module.embed.weight.data)
    assert ModuleSource(module).ties() == [("head.weight", "embed.weight")]
    both = torch.randn(2, 6)
    module.norm.weight, module.norm.bias = nn.Parameter(both[0]), nn.Parameter(both[1])
    assert ModuleSource(module).ties() == [("head.weight", "embed.weight")]


def test_a_tie_follows_the_names_that_are_sent() -> None:
    renamed = ModuleSource(Tiny(tied=True), names=lambda name: {"head.weight": "lm_head.weight"}.get(name, name))
    assert renamed.ties() == [("lm_head.weight", "embed.weight")]
    without = ModuleSource(Tiny(tied=True), names=lambda name: None if name == "head.weight" else name)
    assert without.ties() == []
    only = ModuleSource(Tiny(tied=True), names=lambda name: None if name == "embed.weight" else name)
    assert only.ties() == []
    assert "head.weight" in dict(only)


def test_what_wraps_a_module_is_not_in_the_names() -> None:
    module = Tiny()
    names = [m.name for m in ModuleSource(module).metadata()]
    module.layers[0] = torch.compile(module.layers[0], backend="eager")  # type: ignore[assignment]
    compiled = torch.compile(module, backend="eager")
    assert isinstance(compiled, nn.Module)
    assert [m.name for m in ModuleSource(compiled).metadata()] == names


def test_two_parameters_of_one_name_are_refused_at_once() -> None:
    with pytest.raises(LayoutInvalid, match=r"one name.*layers\.weight"):
        ModuleSource(Tiny(), names=lambda name: name.replace(".0.", ".").replace(".1.", "."))


def _shrink(module: Tiny) -> None:
    module.norm.weight = nn.Parameter(torch.ones(5))


def _cast(module: Tiny) -> None:
    module.norm.weight = nn.Parameter(torch.ones(6, dtype=torch.bfloat16))


def _lose(module: Tiny) -> None:
    del module.norm.weight


def _gain(module: Tiny) -> None:
    module.norm.scale = nn.Parameter(torch.ones(6))


def _free(module: Tiny) -> None:
    module.norm.weight.untyped_storage().resize_(0)


def _to_meta(module: Tiny) -> None:
    module.norm.weight = nn.Parameter(module.norm.weight.to("meta"))


@pytest.mark.parametrize("change", [_shrink, _cast, _lose, _gain, _free, _to_meta], ids=lambda f: f.__name__[1:])
def test_parameters_that_are_not_as_stated_are_refused_before_anything_is_yielded(change: Any) -> None:
    module = Tiny()
    source = ModuleSource(module)
    change(module)
    with pytest.raises(LayoutInvalid, match=r"norm\.(weight|scale)"):
        next(iter(source))


def test_offloaded_parameters_of_one_shape_are_no_ties() -> None:
    """Without memory of their own, all seem to lie at the same place."""
    module = Tiny()
    for parameter in module.parameters():
        parameter.untyped_storage().resize_(0)
    assert ModuleSource(module).ties() == []
    with torch.device("meta"):
        assert ModuleSource(Tiny()).ties() == []


# ---- any iterator ----

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
STATED = [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()]


def test_an_iterators_tensors_are_yielded_in_each_pass() -> None:
    passes: list[int] = []

    def make() -> Iterator[tuple[str, Tensor]]:
        passes.append(len(passes))
        yield from TENSORS.items()

    source = IterableSource(STATED, make, ties=[("c", "a")])
    assert passes == []
    assert export(source) == export(source)
    assert passes == [0, 1]
    assert layout_of(source).ties[0].alias == "c"


def test_metadata_that_is_not_given_is_learnt_in_one_pass() -> None:
    passes: list[int] = []

    def make() -> Iterator[tuple[str, Tensor]]:
        passes.append(1)
        return iter(TENSORS.items())

    source = IterableSource(None, make)
    assert source.metadata() == source.metadata() == STATED
    assert len(passes) == 1


def test_metadata_of_vllms_kind_is_taken() -> None:
    @dataclass
    class Theirs:
        name: str
        dtype: torch.dtype
        shape: tuple[int, ...]

    theirs = [Theirs(m.name, m.dtype, torch.Size(m.shape)) for m in STATED]
    assert IterableSource(theirs, TENSORS.items).metadata() == STATED


@pytest.mark.parametrize(
    ("yielded", "problem"),
    [
        ([("a", TENSORS["a"])], "without tensors.*b"),
        ([*TENSORS.items(), ("c", torch.ones(1))], "more tensors.*c"),
        ([("a", TENSORS["a"]), ("a", TENSORS["a"])], "twice"),
        ([("b", TENSORS["b"]), ("a", TENSORS["a"])], "leaves out a"),
        ([("a", TENSORS["a"].t()), ("b", TENSORS["b"])], r"shape \(3, 2\)"),
        ([("a", TENSORS["a"].double()), ("b", TENSORS["b"])], "float64"),
    ],
)
def test_an_iterator_that_yields_something_else_is_refused_at_that_tensor(
    yielded: list[tuple[str, Tensor]], problem: str
) -> None:
    with pytest.raises(LayoutInvalid, match=problem):
        export(IterableSource(STATED, lambda: yielded))


def test_a_name_that_is_stated_twice_is_refused_before_the_iterator_is_asked() -> None:
    def never() -> Iterator[tuple[str, Tensor]]:
        raise AssertionError

    with pytest.raises(LayoutInvalid, match="twice"):
        export(IterableSource([*STATED, STATED[0]], never))


def test_an_iterator_that_is_used_up_is_refused() -> None:
    once = iter(TENSORS.items())
    source = IterableSource(STATED, lambda: once)
    export(source)
    with pytest.raises(LayoutInvalid, match="ended without"):
        export(source)


# ---- groups, as vLLM has them ----


class Listed(LayerwiseSource):
    def __init__(self, stated: list[str], yielded: list[str], held: list[str] | None = None) -> None:
        self._stated, self._yielded, self._held = stated, yielded, held

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, torch.float32, (1,)) for name in self._stated]

    def held_names(self) -> list[str] | None:
        return self._held

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, torch.ones(1)) for name in self._yielded)


NAMES = ["embed", "layers.0.a", "layers.0.experts.3.w", "layers.1.a", "norm", "head"]
GROUPS = [["embed"], ["layers.0.a", "layers.0.experts.3.w"], ["layers.1.a"], ["norm", "head"]]


def test_groups_are_one_for_each_layer_and_what_stands_around_them() -> None:
    source = Listed(NAMES, NAMES)
    assert source.held_names() is None
    assert source.groups() == GROUPS
    assert [names for names, _ in source.iter_groups()] == GROUPS
    assert [len(tensors) for _, tensors in source.iter_groups()] == [1, 2, 1, 2]
    assert source.ties() == ()


def test_groups_in_which_a_rank_holds_nothing_are_not_its_own() -> None:
    assert Listed(NAMES, NAMES, held=["layers.1.a"]).groups() == [["layers.1.a"]]


@pytest.mark.parametrize("yielded", [NAMES[:-1], NAMES[::-1], [*NAMES[:-1], "other"], [*NAMES, "more"]])
def test_an_iteration_that_does_not_follow_its_groups_is_refused(yielded: list[str]) -> None:
    with pytest.raises(LayoutInvalid):
        list(Listed(NAMES, yielded).iter_groups())


def test_layers_come_in_rising_order_and_stacks_as_they_first_appear() -> None:
    names = ["visual.blocks.1.w", "post", "visual.blocks.0.w", "layers.10.w", "layers.9.w"]
    assert layerwise_groups(names) == [
        ["visual.blocks.0.w"],
        ["visual.blocks.1.w"],
        ["layers.9.w"],
        ["layers.10.w"],
        ["post"],
    ]


PARTS = st.lists(st.sampled_from(["layers", "0", "1", "10", "w", "experts"]), min_size=1, max_size=5).map(".".join)


@given(st.lists(PARTS, unique=True, max_size=30))
def test_groups_are_a_partition(names: list[str]) -> None:
    assert sorted(name for group in layerwise_groups(names) for name in group) == sorted(names)
    assert all(layerwise_groups(names))


# ---- a model and its draft ----


def pair(shared: tuple[str, ...] = ("embed",), draft_has: tuple[str, ...] = ("layers.0.w", "fc")) -> WithDraft:
    model = IterableSource(
        None, lambda: [("embed", torch.ones(3)), ("layers.0.w", torch.ones(2)), ("n", torch.ones(1))]
    )
    draft = IterableSource(
        None, lambda: [(name, torch.zeros(5)) for name in draft_has], ties=[("head", "embed"), ("up", "fc")]
    )
    return WithDraft(model, draft, shared=shared)


def test_a_draft_follows_its_model_under_prefixed_names_and_a_shared_tensor_is_sent_once() -> None:
    source = pair()
    layout = layout_of(source)
    assert [t.name for t in layout.tensors] == [name for name, _ in source]
    assert [t.name for t in layout.tensors][3:] == ["draft:layers.0.w", "draft:fc"]
    assert layout.draft is not None
    assert [t.name for t in layout.draft.tensors] == ["embed", "layers.0.w", "fc"]
    assert [(t.alias, t.source) for t in layout.draft.ties] == [("head", "embed"), ("up", "fc")]
    assert [name for names, _ in source.iter_groups() for name in names] == [t.name for t in layout.tensors]


@pytest.mark.parametrize(
    ("shared", "draft_has"), [(("nobody's",), ("fc",)), (("embed",), ("embed", "fc"))], ids=["unknown", "sent_twice"]
)
def test_a_shared_tensor_is_the_models_and_nobody_elses(shared: tuple[str, ...], draft_has: tuple[str, ...]) -> None:
    with pytest.raises(LayoutInvalid, match="shared"):
        layout_of(pair(shared, draft_has))
