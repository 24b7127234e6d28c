"""The canary: a fixed prompt through new weights, to see that they speak before anyone is served by them.

Promises a reply made without the prefix cache, of full length and of finite numbers only. It says nothing of
whether the weights are good, only that they are usable.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from controlplane.core.canary import Canary
from engine_agent.vllm.scheduler import CANARY

PROMPT_TOKENS = 16
DECODED_TOKENS = 2
"""One by the forward pass of the prompt, one by a pass over the KV cache that it left: there is no third kind."""
CORES_TOLERANCE = 0.25
"""Between logprobs of two cores; far above what bf16 does in other batches (0.03), below what other weights do."""
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


async def speak(
    llm: Any, prompt: list[int], decoded: int, resume: Callable[[], Awaitable[None]], cores: int = 1
) -> Canary:
    """Run the prompt on every core of a paused engine, which `resume` lets run. Raises CanarySilent.

    The requests are in the cores' queues before a scheduler runs, else kept requests would take every place.
    """
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    masks = llm.vllm_config.model_config.return_sampling_mask  # such an engine takes no temperature of 0
    params = SamplingParams(
        temperature=1.0 if masks else 0.0,
        top_k=1 if masks else 0,
        max_tokens=decoded,
        ignore_eos=True,
        logprobs=0,
        prompt_logprobs=0,  # also makes vLLM leave the prefix cache unread
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    name = f"{CANARY}{next(_numbers)}"
    names = [f"{name}-{core}" for core in range(cores)]
    replies = [
        await llm.add_request(
            names[core],
            tokens_input(prompt, cache_salt=name),
            params,
            priority=FIRST,
            data_parallel_rank=core if cores > 1 else None,
        )
        for core in range(cores)
    ]
    try:
        await resume()
        return _agreed([_judge(await reply.get(), prompt, decoded) for reply in replies])
    finally:
        for name in names:
            await llm.abort(name)  # of a request that ended by itself nothing is left to abort


def _agreed(reports: list[Canary]) -> Canary:
    """Cores of one engine hold the same bytes, and say the same but for the rounding of different batches."""
    first = reports[0]
    for core, report in enumerate(reports[1:], start=1):
        pairs = zip(first.prompt_logprobs, report.prompt_logprobs, strict=True)
        apart = max((abs(a - b) for a, b in pairs), default=0.0)
        if apart > CORES_TOLERANCE:
            raise CanarySilent(f"core {core} says other than core 0: {apart:.3f} apart in a logprob")
    return first


def _judge(output: Any, prompt: list[int], decoded: int) -> Canary:
    choice = output.outputs[0]
    scored = [
        entry[token].logprob for token, entry in zip(prompt[1:], (output.prompt_logprobs or [])[1:], strict=False)
    ]
    spoken = [entry[token].logprob for token, entry in zip(choice.token_ids, choice.logprobs or (), strict=False)]
    return judge(choice.token_ids, spoken, scored, prompt, decoded)


def judge(
    tokens: Sequence[int], spoken: Sequence[float], scored: Sequence[float], prompt: Sequence[int], decoded: int
) -> Canary:
    """`spoken`: log probabilities of the decoded tokens; `scored`: of the prompt's, from the second on.

    Raises CanarySilent.
    """
    if not len(tokens) == len(spoken) == decoded or len(scored) != len(prompt) - 1:
        raise CanarySilent(f"{len(tokens)} of {decoded} tokens and {len(scored)} of {len(prompt) - 1} logprobs came")
    prompt_logprobs = tuple(scored)
    wrong = [v for v in (*prompt_logprobs, *spoken) if not math.isfinite(v)]
    if wrong:
        raise CanarySilent(f"{len(wrong)} of {len(prompt_logprobs) + len(spoken)} logprobs are not finite", nan=True)
    return Canary(prompt_logprobs, tuple(tokens))
