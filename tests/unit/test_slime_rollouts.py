"""Rollout functions in slime's and vime's shape, over scripted engines and real gRPC."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from controlplane.core.errors import EngineDied, InvalidRequest
from controlplane.core.sample_spans import Span
from controlplane.core.versions import EngineId
from controlplane.rollout.adapters import slime_sample
from controlplane.rollout.adapters.slime import close, generate, generate_rollout
from controlplane.rollout.sample import SPANS_KEY, Sample
from tests.support import slime_types
from tests.support.eventually import eventually
from tests.support.fake_fleet import finish, hangs, refuses, says, tokens, version
from tests.support.rollout_world import PROMPT, World, first_then
from tests.support.slime_types import DataSource, arguments
from weightplane.v1 import rollout_pb2

PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 4, "stop": None, "no_stop_trim": True}
WHOLE = says(tokens(5, 6, 7, 8), finish((1, 0, 4)))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model directory with a tokenizer of 20 words: token 5 is the text `w5`."""
    return slime_types.word_tokenizer(tmp_path_factory.mktemp("words"), 20)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    await made.start()
    yield made
    await close()
    await made.stack.aclose()


async def test_a_sample_gets_its_tokens_their_logprobs_and_the_number_of_the_version_that_made_them(
    world: World, checkpoint: str
) -> None:
    world.fleet.publish(await world.engine("a", WHOLE))
    sample = slime_types.Sample(prompt="w1 w2 w3")
    assert await generate(arguments(world.server.address, checkpoint), sample, PARAMS) is sample
    sample.check()
    assert (sample.tokens, sample.response_length, sample.response) == ([1, 2, 3, 5, 6, 7, 8], 4, "w5 w6 w7 w8")
    assert (sample.rollout_log_probs, sample.loss_mask) == ([-5.0, -6.0, -7.0, -8.0], [1, 1, 1, 1])
    assert (sample.weight_versions, sample.metadata[SPANS_KEY]) == (["1"], [[1, 1, 0, 4]])
    assert sample.status is slime_types.Sample.Status.TRUNCATED
    assert (sample.prefix_cache_info.cached_tokens, sample.prefix_cache_info.total_prompt_tokens) == (2, 3)


async def test_inv11_an_aborted_sample_goes_on_under_the_new_version_and_both_are_in_it(
    world: World, checkpoint: str
) -> None:
    aborted = says(tokens(5, 6), finish((1, 0, 2), reason="ABORT", stop_reason="aborted"))
    rest = says(tokens(7, made_by=2), finish((2, 0, 1), reason="STOP"))
    engine = await world.engine("a", first_then(aborted, rest))
    world.fleet.publish(engine)
    args, sample = arguments(world.server.address, checkpoint), slime_types.Sample(tokens=list(PROMPT))
    await generate(args, sample, PARAMS)
    assert (sample.status.value, sample.response_length, sample.weight_versions) == ("aborted", 2, ["1"])
    await generate(args, sample, PARAMS)
    sample.check()
    assert (sample.status.value, sample.response, sample.weight_versions) == ("completed", "w5 w6 w7", ["1", "2"])
    assert sample.metadata[SPANS_KEY] == [[1, 1, 0, 2], [2, 1, 2, 3]]
    again = engine.requests[1]
    assert (list(again.prompt_token_ids), again.sampling.max_tokens) == ([*PROMPT, 5, 6], 2)


async def test_a_sample_that_an_update_cuts_goes_on_at_once(world: World, checkpoint: str) -> None:
    cut = says(tokens(5, 6), finish((1, 0, 2), reason="ABORT", stop_reason="updating"))
    rest = says(tokens(7, 8, made_by=2), finish((2, 0, 2)))
    world.fleet.publish(await world.engine("a", first_then(cut, rest)))
    sample = slime_types.Sample(tokens=list(PROMPT))
    await generate(arguments(world.server.address, checkpoint), sample, PARAMS)
    assert (sample.response_length, sample.weight_versions) == (4, ["1", "2"])


async def test_a_sample_whose_task_their_rollout_cancels_keeps_the_tokens_that_it_has(
    world: World, checkpoint: str
) -> None:
    assert generate.abort_mode == "request"  # type: ignore[attr-defined]  # what tells their rollout to cancel it
    engine = await world.engine("a", hangs(tokens(5, 6)))
    world.fleet.publish(engine)
    sample = slime_types.Sample(tokens=list(PROMPT))
    task = asyncio.create_task(generate(arguments(world.server.address, checkpoint), sample, PARAMS))
    await eventually(lambda: engine.running == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (sample.tokens, sample.response, sample.weight_versions) == ([*PROMPT, 5, 6], "w5 w6", ["1"])
    assert sample.status is slime_types.Sample.Status.ABORTED
    await eventually(lambda: engine.running == 0)


@pytest.mark.parametrize(
    ("fields", "params", "problem"),
    [
        ({"multimodal_inputs": {"images": ["x"]}}, {}, "multimodal"),
        ({"status": slime_types.Sample.Status.COMPLETED}, {}, "only pending and aborted"),
        ({"response_length": 2}, {}, "have no rollout_log_probs"),
        ({"response_length": 2, "rollout_log_probs": [0.0]}, {}, "1 entries for 2"),
        ({"response_length": 9}, {}, "a response of 9 in 3 tokens"),
        ({"prompt": [{"role": "user"}], "tokens": []}, {}, "a conversation"),
        ({}, {"custom_params": {"x": 1}}, "custom_params has no place"),
        ({}, {"max_new_tokens": None}, "max_new_tokens is None"),
        (
            {"status": slime_types.Sample.Status.ABORTED, "response_length": 1, "rollout_log_probs": [0.0]},
            {"stop": ["x"]},
            "with extra.stop it cannot go on",
        ),
    ],
)
async def test_what_cannot_be_served_truthfully_is_refused_before_an_engine_is_asked(
    world: World, checkpoint: str, fields: dict[str, Any], params: dict[str, Any], problem: str
) -> None:
    engine = await world.engine("a", WHOLE)
    world.fleet.publish(engine)
    sample = slime_types.Sample(**({"tokens": list(PROMPT)} | fields))
    with pytest.raises(InvalidRequest, match=problem):
        await generate(arguments(world.server.address, checkpoint), sample, PARAMS | params)
    assert engine.requests == []


async def test_a_response_that_is_full_asks_nobody(world: World, checkpoint: str) -> None:
    sample = slime_types.Sample(tokens=[1, 5, 6, 7, 8], response_length=4, rollout_log_probs=[0.0] * 4)
    await generate(arguments(world.server.address, checkpoint), sample, PARAMS)
    assert sample.status is slime_types.Sample.Status.TRUNCATED


def test_sampling_parameters_keep_their_meaning_under_the_engines_names() -> None:
    params = PARAMS | {"stop": ["x"], "stop_token_ids": [3], "sampling_seed": 7, "min_new_tokens": 1, "top_k": 5}
    settings = slime_sample.settings_of(params, done=1)
    assert (settings.max_tokens, settings.seed, settings.min_tokens, settings.top_k) == (3, 8, 1, 5)
    assert settings.stop_token_ids == (3,)
    assert settings.extra == {"stop": ["x"], "include_stop_str_in_output": True}
    assert slime_sample.settings_of(PARAMS, done=0).top_k == 0


# ---- whole rollouts -----------------------------------------------------------------------------


async def roll_out(args: Any, source: DataSource, rollout_id: int = 3) -> list[list[slime_types.Sample]]:
    groups: list[list[slime_types.Sample]] = await asyncio.to_thread(generate_rollout, args, rollout_id, source)
    for sample in (sample for group in groups for sample in group):
        sample.check()
    return groups


async def test_a_rollout_is_a_batch_of_whole_groups_in_order_with_rewards(world: World, checkpoint: str) -> None:
    world.fleet.publish(await world.engine("a", WHOLE), await world.engine("b", WHOLE))
    source = DataSource([[1], [2], [3], [4]])
    groups = await roll_out(arguments(world.server.address, checkpoint), source)
    assert [[s.index for s in group] for group in groups] == [[0, 1], [2, 3]]
    assert {s.reward for group in groups for s in group} == {4.0}
    assert len(source.get_samples(9)) == 2


async def test_a_filter_drops_groups_and_others_take_their_place(world: World, checkpoint: str) -> None:
    world.fleet.publish(await world.engine("a", WHOLE))
    hooks = {"dynamic_sampling_filter_path": "tests.support.slime_types.keeps_even_groups", "group_rm": True}
    args = arguments(world.server.address, checkpoint, custom_rm_path="tests.support.slime_types.rewards_of", **hooks)
    groups = await roll_out(args, DataSource([[1], [2], [3], [4]]))
    assert [group[0].group_index for group in groups] == [0, 2]
    assert {s.reward for group in groups for s in group} == {2.0}


class Slow:
    """Two tokens and then nothing more, for prompts that begin with 9; the others get theirs once two such wait. The
    second time round all get theirs, from version 2."""

    def __init__(self) -> None:
        self.waiting = 0
        self.second = False

    async def __call__(self, request: rollout_pb2.GenerateRequest) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        if self.second:
            yield tokens(7, 8, made_by=2)
            yield finish((2, 0, 2))
        elif request.prompt_token_ids[0] == 9:
            yield tokens(5, 6)
            self.waiting += 1
            await asyncio.Event().wait()
        else:
            await eventually(lambda: self.waiting == 2)
            yield tokens(5, 6, 7, 8)
            yield finish((1, 0, 4))


async def test_partial_rollouts_come_back_with_their_tokens_and_go_on_under_the_next_version(
    world: World, checkpoint: str
) -> None:
    script = Slow()
    world.fleet.publish(await world.engine("a", script))
    source = DataSource([[1], [2], [9]])
    options = {"partial_rollout": True, "over_sampling_batch_size": 3}
    groups = await roll_out(arguments(world.server.address, checkpoint, **options), source)
    assert [group[0].group_index for group in groups] == [0, 1]
    (waiting,) = source.buffer
    assert [(s.status.value, s.tokens, s.weight_versions) for s in waiting] == [("aborted", [9, 5, 6], ["1"])] * 2
    assert {s.metadata["start_rollout_id"] for s in waiting} == {3}

    script.second = True
    args = arguments(world.server.address, checkpoint, rollout_batch_size=1, **options)
    args.mask_offpolicy_in_partial_rollout = True
    (group,) = await roll_out(args, source, rollout_id=4)
    assert [(s.tokens, s.weight_versions) for s in group] == [([9, 5, 6, 7, 8], ["1", "2"])] * 2
    assert {tuple(s.loss_mask or ()) for s in group} == {(0, 0, 1, 1)}
    assert {s.metadata["start_rollout_id"] for s in group} == {3}


async def test_requests_that_wait_for_an_engine_come_back_untouched(world: World, checkpoint: str) -> None:
    engine = await world.engine("a", Slow(), max_requests=4)
    world.fleet.publish(engine)
    source = DataSource([[9], [1], [8], [7]])
    options = {"partial_rollout": True, "over_sampling_batch_size": 4, "rollout_batch_size": 1}
    groups = await roll_out(arguments(world.server.address, checkpoint, **options), source)
    assert len(groups) == 1
    assert groups[0][0].group_index != 0
    await eventually(lambda: engine.running == 0)
    assert {s.status.value for group in source.buffer for s in group} <= {"aborted", "truncated"}
    assert [len(s.tokens) - s.response_length for group in source.buffer for s in group] == [1] * 6


async def test_without_partial_rollouts_what_is_not_done_is_dropped_and_no_engine_works_on_it(
    world: World, checkpoint: str
) -> None:
    engine = await world.engine("a", Slow())
    world.fleet.publish(engine)
    source = DataSource([[1], [9], [2]])
    await roll_out(arguments(world.server.address, checkpoint, over_sampling_batch_size=3), source)
    assert source.buffer == []
    await eventually(lambda: engine.running == 0)


async def test_an_error_ends_the_rollout_as_itself(world: World, checkpoint: str) -> None:
    world.fleet.publish(await world.engine("a", refuses(InvalidRequest(field="x", problem="no"))))
    with pytest.raises(InvalidRequest, match="no"):
        await roll_out(arguments(world.server.address, checkpoint), DataSource([[1], [2]]))


async def test_a_generate_function_of_theirs_makes_the_samples_and_may_not_swap_them(
    world: World, checkpoint: str
) -> None:
    world.fleet.publish(await world.engine("a", WHOLE))
    args = arguments(world.server.address, checkpoint)
    args.custom_generate_function_path = "tests.support.slime_types.generates_twice"
    groups = await roll_out(args, DataSource([[1], [2]]))
    assert {tuple(s.tokens[1:]) for group in groups for s in group} == {(5, 6, 7, 8, 11, 5, 6, 7, 8)}
    assert {tuple(s.loss_mask or ()) for group in groups for s in group} == {(1, 1, 1, 1, 0, 1, 1, 1, 1)}
    assert {str(s.metadata[SPANS_KEY]) for group in groups for s in group} == {"[[1, 1, 0, 4], [1, 1, 5, 9]]"}
    args.custom_generate_function_path = "tests.support.slime_types.generates_another"
    with pytest.raises(InvalidRequest, match="another sample"):
        await roll_out(args, DataSource([[1], [2]]))


async def test_what_lags_more_than_is_allowed_is_masked(world: World, checkpoint: str) -> None:
    mixed = says(tokens(5, 6), tokens(7, 8, made_by=3), finish((1, 0, 2), (3, 2, 4)))
    world.fleet.commits(1, 2, 3)
    world.fleet.publish(await world.engine("a", mixed))
    groups = await roll_out(arguments(world.server.address, checkpoint, weightplane_max_lag=1), DataSource([[1], [2]]))
    assert {tuple(s.loss_mask or ()) for group in groups for s in group} == {(0, 0, 1, 1)}


async def test_a_sample_with_stop_strings_that_an_update_cuts_begins_anew(world: World, checkpoint: str) -> None:
    """A string may lie across the cut, and no engine would find it in a prompt."""
    cut = says(tokens(5, 6), finish((1, 0, 2), reason="ABORT", stop_reason="updating"))
    engine = await world.engine("a", first_then(cut, WHOLE))
    world.fleet.publish(engine)
    sample = slime_types.Sample(tokens=list(PROMPT))
    await generate(arguments(world.server.address, checkpoint), sample, PARAMS | {"stop": ["x"]})
    assert (sample.tokens, sample.weight_versions) == ([*PROMPT, 5, 6, 7, 8], ["1"])
    assert [list(request.prompt_token_ids) for request in engine.requests] == [PROMPT, PROMPT]


def test_what_has_no_place_is_refused_and_no_coordinator_is_asked() -> None:
    source = DataSource([[1]])
    with pytest.raises(InvalidRequest, match="--eval-function-path"):
        generate_rollout(arguments("nowhere:1", ""), 0, source, evaluation=True)
    with pytest.raises(InvalidRequest, match="all_samples_process"):
        generate_rollout(arguments("nowhere:1", "", rollout_all_samples_process_path="x.y"), 0, source)
    with pytest.raises(InvalidRequest, match=r"args\.rollout_stop: a string that lies across the cut"):
        generate_rollout(arguments("nowhere:1", "", partial_rollout=True, rollout_stop=["x"]), 0, source)
    with pytest.raises(InvalidRequest, match="WEIGHTPLANE_COORDINATOR"):
        generate_rollout(arguments("", ""), 0, source)


# ---- one sample ---------------------------------------------------------------------------------


def made(*spans: Span, reason: str = "stop", logprobs: bool = True) -> Sample:
    ids = tuple(range(spans[-1].end))
    return Sample(ids, tuple(map(float, ids)) if logprobs else (), spans, reason, "", EngineId("e"), 1, 0)


def test_a_sample_in_slimes_words_is_what_their_from_dict_takes() -> None:
    ours = made(Span(version(3), 0, 1), Span(version(12), 1, 3))
    theirs = slime_types.Sample.from_dict(ours.to_slime([7, 7], mask=[False, True, True]))
    theirs.check()
    assert (theirs.tokens, theirs.response_length, theirs.loss_mask) == ([7, 7, 0, 1, 2], 3, [0, 1, 1])
    assert (theirs.weight_versions, theirs.status.value) == (["3", "12"], "completed")
    assert made(Span(version(1), 0, 1), logprobs=False).to_slime([7])["rollout_log_probs"] is None
    assert [made(Span(version(1), 0, 1), reason=r).to_slime([7])["status"] for r in ("length", "abort")] == [
        "truncated",
        "aborted",
    ]


def test_a_mask_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="a mask of 1 for 3 tokens"):
        made(Span(version(1), 0, 3)).to_slime([7], mask=[True])


def test_a_sample_whose_tokens_are_all_masked_is_one_to_remove() -> None:
    theirs = slime_types.Sample(tokens=[7])
    slime_sample.append(theirs, made(Span(version(1), 0, 2)))
    slime_sample.mask_spans(theirs, lambda v: v.number == 1)
    assert (theirs.loss_mask, theirs.remove_sample) == ([1, 1], False)
    slime_sample.mask_spans(theirs, lambda v: v.number == 2)
    assert (theirs.loss_mask, theirs.remove_sample) == ([0, 0], True)


async def test_an_engine_that_dies_costs_no_sample(world: World, checkpoint: str) -> None:
    died = refuses(EngineDied(engine_id="a", cause="killed"), tokens(5, 6))
    world.fleet.publish(await world.engine("a", first_then(died, says(tokens(7, 8), finish((1, 0, 2))))))
    sample = slime_types.Sample(tokens=list(PROMPT))
    await generate(arguments(world.server.address, checkpoint), sample, PARAMS)
    assert (sample.response_length, sample.weight_versions) == (4, ["1"])


# ---- what the documentation says ----------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "interoperability.md").read_text()


async def test_the_pages_example_runs_as_it_stands(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "to_slime" in block]
    monkeypatch.setitem(sys.modules, "slime.utils.types", slime_types)
    monkeypatch.setitem(sys.modules, "slime", slime_types)
    monkeypatch.setitem(sys.modules, "slime.utils", slime_types)
    world.fleet.publish(await world.engine("a", WHOLE))
    scope: dict[str, Any] = {}
    exec(compile(code, "docs/interoperability.md", "exec"), scope)
    sample = await scope["roll_out"](world.server.address, PROMPT)
    sample.check()
    assert (sample.tokens, sample.weight_versions) == ([*PROMPT, 5, 6, 7, 8], ["1"])


def test_the_pages_options_name_functions_that_are_there() -> None:
    found = set(re.findall(r"-function-path (controlplane\S+)", PAGE))
    assert found == {f"{function.__module__}.{function.__name__}" for function in (generate, generate_rollout)}
