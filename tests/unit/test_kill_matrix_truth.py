"""The kill matrix's truth about a real engine: it knows the tokens of a step's weights, and those of no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kill_matrix.truth import MARGIN, PROMPT, SAMPLE_TOKENS, MemoryTruth, VllmTruth
from tests.support.reference import Reference
from tests.support.tiny_model import make_tiny_model
from tests.support.tiny_rank import TinyWeights

STEPS = range(1, 9)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), seed=0)


def greedy(model: Path, step: int, prefix: tuple[int, ...] = (), count: int = SAMPLE_TOKENS) -> list[int]:
    return Reference(model).greedy(TinyWeights(model).tensors_of(step), (*PROMPT, *prefix), count)[0]


def test_a_steps_weights_make_its_own_greedy_tokens_and_no_neighbours(model: Path) -> None:
    truth = VllmTruth(model)
    said = {step: greedy(model, step) for step in STEPS}
    for step in STEPS:
        makers = [other for other in STEPS if truth.makes(other, said[step], 0, SAMPLE_TOKENS)]
        assert makers == [step]


def test_tokens_after_a_border_are_judged_after_those_before_it(model: Path) -> None:
    truth = VllmTruth(model)
    tokens = greedy(model, 1, count=2)
    tokens += greedy(model, 2, tuple(tokens), 2)
    assert truth.makes(1, tokens, 0, 2)
    assert truth.makes(2, tokens, 2, 4)
    assert not truth.makes(2, tokens, 0, 2)
    assert not truth.makes(1, tokens, 2, 4)


def test_a_near_miss_is_none_and_a_clear_one_is(model: Path) -> None:
    """The reference's own gaps: a token counts as made while it lies within the margin of the best."""
    weights, truth = TinyWeights(model).tensors_of(1), VllmTruth(model)
    for token in range(0, 256, 32):
        [short] = Reference(model).shortfalls(weights, PROMPT, [token])
        assert truth.makes(1, [token], 0, 1) is (short <= MARGIN)


def test_both_engines_of_a_fleet_agree_on_the_content_of_a_step(model: Path) -> None:
    real, memory = VllmTruth(model), MemoryTruth(TinyWeights(model).tensors_of)
    assert real.content(1) == memory.content(1) != real.content(2)
