"""What Megatron's ranks tell each other before they export: agreement, and the same refusal on every rank.

The ranks are threads that meet at a table in place of process groups.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from controlplane.core.errors import LayoutInvalid, WeightplaneError, rebuild
from trainer_agent.megatron.checks import REFUSED, absent, refusals
from trainer_agent.megatron.collectives import Collectives
from trainer_agent.megatron.errors import GatherFailed, UnsupportedModel
from trainer_agent.megatron.families import family_of
from trainer_agent.megatron.families.decoder import DecoderShape
from trainer_agent.megatron.families.rules import Entry
from trainer_agent.megatron.holdings import Held, Holdings, agree, misfits

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 4,
    "mlp_only_layers": [0],
    "tie_word_embeddings": True,
}
FAMILY = family_of(CONFIG)
SHAPE: DecoderShape = FAMILY.shape(CONFIG)
ENTRIES: Sequence[Entry] = tuple(FAMILY.entries(SHAPE))
TIMEOUT_SECONDS = 20.0


@dataclass(frozen=True)
class Place:
    stage: int
    expert: int


PLACES = [Place(stage, expert) for stage in range(2) for expert in range(2)]


def whole_shape(entry: Entry) -> tuple[int, ...]:
    """What one rank's parameter is where nothing is tensor parallel."""
    first = entry.hf[0].shape
    rows = sum(t.shape[0] for t in entry.hf)
    return (rows, *first[1:])


def part_of(place: Place) -> dict[str, Tensor]:
    """Layer 0 and the embedding are on stage 0, layer 1 and the rest on stage 1; each expert rank has one expert."""
    local: dict[str, Tensor] = {}
    for entry in ENTRIES:
        first = entry.megatron.startswith("embedding") or ".layers.0." in entry.megatron
        if place.stage == (0 if first else 1) and entry.expert in (None, place.expert):
            local[entry.megatron] = torch.zeros(whole_shape(entry))
    return local


class Table:
    """Where ranks put what they say, and wait until all of a group have."""

    def __init__(self) -> None:
        self._said: dict[Any, dict[int, str]] = {}
        self._turn = threading.Condition()

    def exchange(self, key: Any, rank: int, size: int, value: Any) -> list[Any]:
        with self._turn:
            said = self._said.setdefault(key, {})
            said[rank] = json.dumps(value)
            self._turn.notify_all()
            assert self._turn.wait_for(lambda: len(said) == size, TIMEOUT_SECONDS)
            return [json.loads(said[r]) for r in range(size)]


def collectives(place: Place, table: Table) -> Collectives:
    groups = SimpleNamespace(
        expert=SimpleNamespace(key=("expert", place.stage), rank=place.expert, size=2),
        pipeline=SimpleNamespace(key=("pipeline", place.expert), rank=place.stage, size=2),
        world=SimpleNamespace(key="world", rank=PLACES.index(place), size=len(PLACES)),
        tensor=SimpleNamespace(size=1),
        expert_tensor=SimpleNamespace(size=1),
    )

    def exchange(value: Any, group: Any, gathered: str) -> list[Any]:
        return table.exchange(group.key, group.rank, group.size, value)

    return cast(Collectives, SimpleNamespace(groups=groups, exchange=exchange))


Change = Callable[[Place, dict[str, Tensor]], list[str]]
"""Changes what a rank holds, and gives what it refuses."""


def nothing(place: Place, local: dict[str, Tensor]) -> list[str]:
    return []


def all_agree(change: Change = nothing) -> list[Holdings | UnsupportedModel]:
    table = Table()

    def one(place: Place) -> Holdings | UnsupportedModel:
        local = part_of(place)
        refused = change(place, local)
        try:
            return agree(local, ENTRIES, refused, collectives(place, table))
        except UnsupportedModel as error:
            return error

    with ThreadPoolExecutor(len(PLACES)) as pool:
        return list(pool.map(one, PLACES))


def refusal(change: Change) -> str:
    """The one text with which every rank refuses."""
    answers = all_agree(change)
    assert all(isinstance(answer, UnsupportedModel) for answer in answers)
    (text,) = {str(answer) for answer in answers}
    return text


def test_every_rank_learns_who_holds_what() -> None:
    first, *others = all_agree()
    assert all(other == first for other in others)
    assert isinstance(first, Mapping)
    assert first.keys() == {entry.megatron for entry in ENTRIES}
    assert first["embedding.word_embeddings.weight"] == Held(0, None, (10, 8), torch.float32)
    assert first["decoder.layers.1.mlp.experts.1.linear_fc2.weight"] == Held(1, 1, (8, 4), torch.float32)
    assert first["decoder.layers.1.mlp.router.weight"].expert_rank is None


def test_what_one_rank_refuses_all_do() -> None:
    def one_refuses(place: Place, local: dict[str, Tensor]) -> list[str]:
        return ["this can't be"] if place == PLACES[2] else []

    assert refusal(one_refuses) == "this can't be"


def test_a_parameter_that_no_rank_holds_is_named() -> None:
    def lose(place: Place, local: dict[str, Tensor]) -> list[str]:
        local.pop("decoder.layers.1.mlp.experts.1.linear_fc1.weight", None)
        return []

    assert refusal(lose) == "decoder.layers.1.mlp.experts.1.linear_fc1.weight is on no stage"


def test_a_parameter_that_the_family_does_not_know_is_named() -> None:
    def add(place: Place, local: dict[str, Tensor]) -> list[str]:
        if place == PLACES[3]:
            local["mtp.layers.0.weight"] = torch.zeros(1)
        return []

    assert refusal(add) == "mtp.layers.0.weight has no mapping"


def test_a_parameter_on_two_stages_is_named() -> None:
    def twice(place: Place, local: dict[str, Tensor]) -> list[str]:
        local["decoder.final_layernorm.weight"] = torch.zeros(8)
        return []

    assert refusal(twice) == "decoder.final_layernorm.weight is held twice, differently"


def test_an_expert_on_two_ranks_is_named() -> None:
    name = "decoder.layers.1.mlp.experts.0.linear_fc2.weight"

    def twice(place: Place, local: dict[str, Tensor]) -> list[str]:
        if place.stage == 1:
            local[name] = torch.zeros(8, 4)
        return []

    assert refusal(twice) == f"{name} is held twice, differently"


def test_replicas_that_differ_are_refused() -> None:
    """Each would wait for the other in the first tensor that is not alike."""

    def differ(place: Place, local: dict[str, Tensor]) -> list[str]:
        name = "decoder.layers.0.input_layernorm.weight"
        if place == PLACES[1]:
            local[name] = local[name].bfloat16()
        return []

    assert "differently" in refusal(differ)


def test_shapes_that_are_not_the_configs_are_named_with_both() -> None:
    held = {e.megatron: Held(0, e.expert, whole_shape(e), torch.float32) for e in ENTRIES}
    assert misfits(held, ENTRIES, 1, 1) == []
    problems = misfits(held, ENTRIES, 1, 2)
    assert problems
    assert all("experts" in problem for problem in problems)
    problems = misfits(held, ENTRIES, 2, 1)
    assert problems
    assert not any("experts." in problem for problem in problems)


# ---- what names and shapes do not show ----


def chunk(**changes: Any) -> Any:
    config = SimpleNamespace(num_attention_heads=2, num_query_groups=1, kv_channels=4)
    model = SimpleNamespace(config=config, share_embeddings_and_output_weights=True, parameters=list)
    for name, value in changes.items():
        setattr(model if hasattr(model, name) else config, name, value)
    return model


def test_a_model_that_is_its_config_is_not_refused() -> None:
    assert refusals([chunk(), SimpleNamespace(module=chunk())], SHAPE) == []
    assert refusals([chunk(**dict.fromkeys(REFUSED, False))], SHAPE) == []


@pytest.mark.parametrize("flag", sorted(REFUSED))
def test_a_setting_that_no_mapping_covers_is_refused_once(flag: str) -> None:
    (problem,) = refusals([chunk(**{flag: True}), chunk(**{flag: True})], SHAPE)
    assert problem.startswith(f"{flag} ")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_attention_heads": 4, "kv_channels": 2}, r"(2, 1, 4), the model has (4, 1, 2)"),
        ({"num_query_groups": None}, "(2, 2, 4)"),
        ({"share_embeddings_and_output_weights": False}, "tie_word_embeddings True"),
    ],
)
def test_a_model_that_its_config_describes_otherwise_is_refused(changes: dict[str, Any], problem: str) -> None:
    (found,) = refusals([chunk(**changes)], SHAPE)
    assert problem in found


def test_parameters_that_left_are_named_before_a_byte_is_read() -> None:
    local = {"a": torch.zeros(4), "b": torch.zeros(2, 2)}
    owned = {name: Held(0, None, tuple(t.shape), t.dtype) for name, t in local.items()}
    assert absent(local, owned) == []
    assert absent({"a": torch.zeros(5), "b": local["b"]}, owned) == ["a"]
    assert absent({"a": torch.zeros(4, dtype=torch.bfloat16), "b": local["b"]}, owned) == ["a"]
    assert absent({"a": torch.zeros(4, device="meta"), "b": local["b"]}, owned) == ["a"]
    assert absent({"b": local["b"]}, owned) == ["a"]
    assert absent(local | {"c": torch.zeros(1)}, owned) == ["c"]


# ---- errors ----


def test_a_model_that_is_not_supported_is_an_invalid_layout_to_the_others() -> None:
    unsupported = UnsupportedModel("no mapping for it")
    assert str(unsupported) == "no mapping for it"
    assert type(rebuild(unsupported.reason, unsupported.metadata())) is LayoutInvalid


def test_a_failed_gather_is_none_of_the_errors_after_which_a_push_is_repeated() -> None:
    assert not issubclass(GatherFailed, WeightplaneError)
