"""Routed experts and sampling masks: from vLLM's own outputs, over the wire in parts, into a sample."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.core.errors import SpanMismatch
from controlplane.core.routed_experts import RoutedExperts
from controlplane.core.sample_spans import Span
from controlplane.core.versions import EngineId, Term, WeightVersion
from controlplane.rollout.sample import Assembly, Delta, Ending
from controlplane.rpc.codec import routed_from_proto, routed_to_proto
from engine_agent.vllm.streams import Stream, _delta

VERSION = WeightVersion(1, Term(1))
ROUTED = RoutedExperts(2, layers=2, top_k=3, experts=bytes(range(5 * 12)))
"""Of tokens 2 to 6."""


def test_each_tokens_experts_are_found_by_its_place() -> None:
    assert ROUTED.tokens == 5
    assert ROUTED.of(2) == ((0x0100, 0x0302, 0x0504), (0x0706, 0x0908, 0x0B0A))
    assert ROUTED.of(6)[1][2] == 0x3B3A
    for outside in (1, 7):
        with pytest.raises(IndexError):
            ROUTED.of(outside)


@pytest.mark.parametrize(("most", "parts"), [(1, 5), (24, 3), (60, 1), (1000, 1)])
def test_parts_are_whole_tokens_and_together_what_they_were_of(most: int, parts: int) -> None:
    found = [routed_from_proto(routed_to_proto(part)) for part in ROUTED.in_parts(most)]
    assert len(found) == parts
    whole = found[0]
    for part in found[1:]:
        whole = whole.followed_by(part)
    assert whole == ROUTED
    with pytest.raises(ValueError, match="a part from token 2 on"):
        whole.followed_by(found[0])


def delta(tokens: tuple[int, ...] = (), **more: Any) -> Delta:
    return Delta(EngineId("e"), tokens, (-1.0,) * len(tokens), VERSION if tokens else None, **more)


END = Ending("length", "", (Span(VERSION, 0, 2),), 3, 0)


def test_a_sample_has_the_masks_of_its_tokens_and_the_experts_in_one_piece() -> None:
    assembly = Assembly("r")
    assembly.add(delta((7,), sampling_masks=((7, 8),)))
    for part in ROUTED.in_parts(24):
        assembly.add(delta(routed_experts=part))
    assembly.add(delta((9,), sampling_masks=((9,),), ending=END))
    sample = assembly.finish()
    assert sample.sampling_masks == ((7, 8), (9,))
    assert sample.routed_experts == ROUTED


def test_a_part_out_of_order_is_refused() -> None:
    assembly = Assembly("r")
    first, _, third = ROUTED.in_parts(24)
    assembly.add(delta(routed_experts=first))
    with pytest.raises(SpanMismatch, match="routed experts in order"):
        assembly.add(delta(routed_experts=third))


def test_a_sample_of_two_engines_says_no_experts_and_no_masks_that_only_one_of_them_said() -> None:
    """Whoever goes on computes the other's tokens anew, with weights of its own."""
    assembly = Assembly("r")
    assembly.add(delta((7,), sampling_masks=((7, 8),), routed_experts=ROUTED))
    assembly.begin_part()
    ending = Ending("length", "", (Span(VERSION, 0, 1),), 4, 0)
    assembly.add(delta((9,), routed_experts=ROUTED, ending=ending))
    sample = assembly.finish()
    assert (sample.sampling_masks, sample.routed_experts) == ((), None)


def output_of_vllm(routed_rows: int) -> Any:
    import numpy as np
    from vllm.outputs import CompletionOutput, RequestOutput, SamplingMask, WeightVersionSpan

    rows = np.arange(routed_rows * 6, dtype=np.uint8).reshape(routed_rows, 2, 3)
    choice = CompletionOutput(0, "", [7, 9], None, None, rows, "length", sampling_mask=SamplingMask([[7, 8], [9]]))
    choice.weight_versions = [WeightVersionSpan("1", 0, 2)]
    return RequestOutput("r", None, [1, 2, 3], None, [choice], finished=True)


@pytest.mark.parametrize(("asked_from", "rows", "first"), [(0, 4, 0), (3, 1, 3)])
def test_what_vllm_gives_is_handed_on_with_the_place_of_its_first_token(asked_from: int, rows: int, first: int) -> None:
    """Three tokens of prompt and two sampled ones: the last one never went through the model."""
    made = _delta(output_of_vllm(rows), Stream(asked_from))
    assert made.sampling_masks == ((7, 8), (9,))
    assert made.routed_experts is not None
    assert (made.routed_experts.first_token, made.routed_experts.tokens) == (first, rows)
    assert made.routed_experts.of(first) == ((0, 1, 2), (3, 4, 5))


@pytest.mark.parametrize("rows", [3, 5])
def test_experts_of_more_or_fewer_tokens_than_there_are_are_left_out(rows: int) -> None:
    assert _delta(output_of_vllm(rows), Stream()).routed_experts is None
