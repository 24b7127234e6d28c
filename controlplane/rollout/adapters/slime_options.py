"""slime's and vime's `args`, as far as rollouts read them."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Any

from controlplane.core.errors import InvalidRequest

COORDINATOR_VARIABLE = "WEIGHTPLANE_COORDINATOR"


def sampling_params_of(args: Any) -> dict[str, Any]:
    """As theirs has them."""
    return {
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
        "top_k": args.rollout_top_k,
        "max_new_tokens": args.rollout_max_response_len,
        "stop": args.rollout_stop,
        "stop_token_ids": args.rollout_stop_token_ids,
        "skip_special_tokens": args.rollout_skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }


def reward_function(args: Any, sample: Any) -> Callable[..., Any]:
    """`args.custom_rm_path`, or the reward hub of the project that the sample is of."""
    own = loaded(args, "custom_rm_path")
    if own is not None:
        return own
    project = type(sample).__module__.partition(".")[0]
    hub = import_module(f"{project}.rollout.rm_hub")
    return hub.batched_async_rm if args.group_rm else hub.async_rm  # type: ignore[no-any-return]


def loaded(args: Any, name: str) -> Callable[..., Any] | None:
    """A function that an option names as MODULE.FUNCTION."""
    path = getattr(args, name, None)
    if path is None:
        return None
    module, _, function = path.rpartition(".")
    found: Callable[..., Any] = getattr(import_module(module), function)
    return found


def coordinator_of(args: Any) -> str:
    found = getattr(args, "weightplane_coordinator", None) or os.environ.get(COORDINATOR_VARIABLE)
    if not found:
        problem = f"neither it nor {COORDINATOR_VARIABLE} in the environment names the coordinator"
        raise InvalidRequest(field="args.weightplane_coordinator", problem=problem)
    return str(found)


@lru_cache
def tokenizer_of(checkpoint: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=True)


def prompt_ids_of(args: Any, prompt: Any) -> list[int]:
    if not isinstance(prompt, str):
        raise InvalidRequest(field="sample.prompt", problem="a conversation; --apply-chat-template makes it a text")
    found: list[int] = tokenizer_of(args.hf_checkpoint).encode(prompt, add_special_tokens=False)
    return found
