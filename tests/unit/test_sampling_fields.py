"""Every sampling field on its way from a caller's settings over the wire into vLLM's own object; what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from controlplane.core.errors import InvalidRequest
from controlplane.core.sampling import SamplingSettings
from controlplane.rpc.codec import sampling_from_proto, sampling_to_proto
from engine_agent.services.entry import OWN_FIELDS
from engine_agent.vllm.calls import Core
from engine_agent.vllm.streams import Streams, sampling_params
from tests.support.fake_fleet import finish, says, tokens
from tests.support.rollout_world import PROMPT, World
from weightplane.v1 import rollout_pb2

MAX_TOKENS = 9
OWN: dict[str, Any] = {
    "max_tokens": 5,
    "temperature": 0.75,
    "top_p": 0.875,
    "top_k": 7,
    "min_p": 0.125,
    "seed": 11,
    "stop_token_ids": (3, 4),
    "ignore_eos": True,
    "min_tokens": 2,
    "logprobs": None,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.25,
}
"""Fields of our own under vLLM's names, away from what they are if nobody gives them."""
BY_NAME: dict[str, Any] = {
    "allowed_token_ids": [1, 2],
    "bad_words": ["no"],
    "extra_args": {"mine": [1, {"deep": True}]},
    "flat_logprobs": True,
    "include_stop_str_in_output": True,
    "logit_bias": {"3": 1.5},
    "logprob_token_ids": [6],
    "prompt_logprob_start": 1,
    "repetition_detection": {"max_pattern_size": 3, "min_count": 2},
    "routed_experts_prompt_start": 2,
    "skip_reading_prefix_cache": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "stop": ["end"],
    "structured_outputs": {"choice": ["yes", "no"]},
    "thinking_token_budget": 4,
    "trace_decode_token_ids": [5, 6],
    "watermarking": False,
}
"""Fields that vLLM alone has."""
NOT_JSON = {"prompt_logprob_token_ids"}
"""An array of vLLM's scoring requests."""
VLLMS_OWN = {"output_text_buffer_length"}
"""vLLM works it out."""


def received(settings: SamplingSettings, priority: int = 0) -> SamplingSettings:
    """What an agent makes of a caller's settings."""
    wire = sampling_to_proto(settings).SerializeToString()
    return sampling_from_proto(rollout_pb2.SamplingParams.FromString(wire), priority)


def vllms(settings: SamplingSettings, *, tokenizer: bool = True) -> Any:
    return sampling_params(received(settings), tokenizer=tokenizer)


def test_every_field_of_vllms_is_ours_or_passed_by_name_or_the_agents_own() -> None:
    from vllm.sampling_params import SamplingParams

    public = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    assert public == set(BY_NAME) | NOT_JSON | VLLMS_OWN | (OWN_FIELDS & public)
    unsent = {"extra", "priority", "prompt_logprobs", "n"}  # sent apart, or for each sample
    assert set(OWN) == set(SamplingSettings.__dataclass_fields__) - unsent


@pytest.mark.parametrize("name", OWN)
def test_a_field_of_our_own_arrives_in_vllms_object(name: str) -> None:
    plain = vllms(SamplingSettings(MAX_TOKENS))
    given = vllms(SamplingSettings(**({"max_tokens": MAX_TOKENS} | {name: OWN[name]})))
    wanted = list(OWN[name]) if isinstance(OWN[name], tuple) else OWN[name]
    assert getattr(given, name) == wanted != getattr(plain, name)
    others = [other for other in OWN if other != name]
    assert [getattr(given, other) for other in others] == [getattr(plain, other) for other in others]


@pytest.mark.parametrize("name", BY_NAME)
def test_a_field_that_only_vllm_has_arrives_by_its_name(name: str) -> None:
    plain = vllms(SamplingSettings(MAX_TOKENS))
    found = getattr(vllms(SamplingSettings(MAX_TOKENS, extra={name: BY_NAME[name]})), name)
    assert found != getattr(plain, name)
    assert holds(found, BY_NAME[name])


def holds(found: Any, given: Any) -> bool:
    """vLLM's objects have more fields than were given, its maps whole numbers as keys."""
    if isinstance(given, Mapping) and not isinstance(found, Mapping):
        return all(getattr(found, name) == value for name, value in given.items())
    if isinstance(given, Mapping):
        return {str(key): value for key, value in found.items()} == given
    return bool(found == given)


def test_no_text_is_made_but_where_a_stop_string_is_looked_for() -> None:
    assert not vllms(SamplingSettings(MAX_TOKENS)).detokenize
    assert not vllms(SamplingSettings(MAX_TOKENS, extra={"stop": []}), tokenizer=False).detokenize
    assert vllms(SamplingSettings(MAX_TOKENS, extra={"stop": "end"})).detokenize


def test_a_score_asks_for_the_logprobs_of_its_prompt() -> None:
    assert sampling_params(SamplingSettings(1, prompt_logprobs=True), tokenizer=False).prompt_logprobs == 0
    assert vllms(SamplingSettings(1)).prompt_logprobs is None


class AskedLlm:
    """Notes what a request is added with, and refuses it."""

    errored = False

    def __init__(self, tokenizer: object | None = None) -> None:
        self.tokenizer = tokenizer
        self.added: list[dict[str, Any]] = []

    async def add_request(self, *_: Any, **how: Any) -> None:
        self.added.append(how)
        raise ValueError("it was asked")


async def asked(llm: AskedLlm, settings: SamplingSettings) -> InvalidRequest:
    """The refusal with which a request ends that comes into an engine."""
    core = Core(llm, "e0", None, lambda _: None)  # type: ignore[arg-type]  # no log is needed
    streams = Streams()
    try:
        with pytest.raises(InvalidRequest) as refused:
            await anext(streams.run(core, "r", [1], settings, ""))
        assert len(streams) == 0
        return refused.value
    finally:
        core.close()


@pytest.mark.parametrize(
    ("extra", "field", "problem"),
    [
        ({"stop": "end"}, "sampling.extra.stop", "no tokenizer loaded"),
        ({"bad_words": ["no"]}, "sampling.extra.bad_words", "no tokenizer loaded"),
        ({"best_of": 2}, "sampling.extra.best_of", "no such field"),
        ({"allowed_token_ids": "x"}, "sampling.extra.allowed_token_ids", "Expected `array | null`"),
    ],
)
async def test_what_an_engine_does_not_have_or_cannot_do_without_a_tokenizer_is_refused_by_name(
    extra: dict[str, Any], field: str, problem: str
) -> None:
    llm = AskedLlm()
    refused = await asked(llm, SamplingSettings(MAX_TOKENS, extra=extra))
    assert refused.field == field
    assert problem in refused.problem
    assert llm.added == []


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        ({"stop": [""]}, "stop cannot contain an empty string"),
        ({"bad_words": [""]}, "bad_words cannot contain an empty string"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "only use one kind"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
    ],
)
async def test_fields_that_vllm_does_not_take_together_are_the_callers_error_in_vllms_words(
    extra: dict[str, Any], problem: str
) -> None:
    llm = AskedLlm(tokenizer=object())
    refused = await asked(llm, SamplingSettings(MAX_TOKENS, extra=extra))
    assert refused.field.startswith("sampling")
    assert problem in refused.problem
    assert llm.added == []


async def test_the_priority_of_a_request_goes_from_its_caller_to_vllms_queue() -> None:
    world = World()
    await world.start()
    try:
        engine = await world.engine("a", says(tokens(5), finish((1, 0, 1))))
        world.fleet.publish(engine)
        await world.client.generate(PROMPT, SamplingSettings(MAX_TOKENS, priority=3))
        (request,) = engine.requests
    finally:
        await world.stack.aclose()
    llm = AskedLlm()
    await asked(llm, sampling_from_proto(request.sampling, request.priority))
    assert llm.added == [{"priority": 3}]
