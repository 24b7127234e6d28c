"""The canary: a fixed prompt through new weights, to see that they speak before anyone is served by them.

Promises a reply made without the prefix cache, of full length and of finite numbers only. It says nothing of
whether the weights are good, only that they are usable.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Awaitable, Callable
from typing import Any

from controlplane.core.canary import Canary

PROMPT_TOKENS = 16
DECODED_TOKENS = 4
FIRST = -1
"""Priority before every request, whose priority is 0."""

_numbers = itertools.count(1)


class CanarySilent(ValueError):
    """The reply is short or not finite; `nan` tells which."""

    def __init__(self, problem: str, *, nan: bool = False) -> None:
        super().__init__(problem)
        self.nan = nan


def canary_prompt(vocab_size: int, max_model_len: int) -> list[int]:
    """Fixed token ids spread over the vocabulary, few enough to leave room for the decoded ones."""
    length = max(2, min(PROMPT_TOKENS, max_model_len - DECODED_TOKENS))
    return [1 + (i * (vocab_size - 1)) // length for i in range(length)]


async def speak(llm: Any, prompt: list[int], decoded: int, resume: Callable[[], Awaitable[None]]) -> Canary:
    """Run the prompt on a paused engine, which `resume` lets run. Raises CanarySilent.

    The request is in the engine's queue before the scheduler runs, else kept requests would take every place.
    """
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    params = SamplingParams(
        temperature=0.0,
        max_tokens=decoded,
        ignore_eos=True,
        logprobs=0,
        prompt_logprobs=0,  # also makes vLLM leave the prefix cache unread
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    name = f"weightplane-canary-{next(_numbers)}"
    reply = await llm.add_request(name, tokens_input(prompt, cache_salt=name), params, priority=FIRST)
    try:
        await resume()
        return _judge(await reply.get(), prompt, decoded)
    finally:
        await llm.abort(name)  # of a request that ended by itself nothing is left to abort


def _judge(output: Any, prompt: list[int], decoded: int) -> Canary:
    choice = output.outputs[0]
    scored = (output.prompt_logprobs or [])[1:]
    tokens = tuple(choice.token_ids)
    if len(tokens) != decoded or len(scored) != len(prompt) - 1 or len(choice.logprobs or ()) != decoded:
        raise CanarySilent(f"{len(tokens)} of {decoded} tokens and {len(scored)} of {len(prompt) - 1} logprobs came")
    prompt_logprobs = tuple(entry[token].logprob for token, entry in zip(prompt[1:], scored, strict=True))
    spoken = [entry[token].logprob for token, entry in zip(tokens, choice.logprobs, strict=True)]
    wrong = [v for v in (*prompt_logprobs, *spoken) if not math.isfinite(v)]
    if wrong:
        raise CanarySilent(f"{len(wrong)} of {len(prompt_logprobs) + len(spoken)} logprobs are not finite", nan=True)
    return Canary(prompt_logprobs, tokens)
