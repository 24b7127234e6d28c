"""slime's `Sample` and data source as their code has them, as far as rollout functions use them: slime is on no index.

Fields and their types are those of `slime/utils/types.py` and `vime/utils/types.py`; the checks are vime's
`_validate_response_metadata_lengths`. The buffer is `RolloutDataSourceWithBuffer`'s: what was put back comes first.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from controlplane.rollout.adapters.slime import generate


@dataclass
class PrefixCacheInfo:
    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    def add(self, meta_info: dict[str, Any]) -> None:
        self.cached_tokens += meta_info.get("cached_tokens", 0)
        self.total_prompt_tokens += meta_info.get("prompt_tokens", 0)


@dataclass
class Sample:
    group_index: int | None = None
    index: int | None = None
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    session_id: str | None = None
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Sample:
        return Sample(**(data | {"status": Sample.Status(data["status"])}))

    def check(self) -> None:
        """What vime refuses to train on."""
        for value in (self.loss_mask, self.rollout_log_probs):
            assert value is None or len(value) == self.response_length
        assert all(isinstance(entry, str) and entry.isdecimal() for entry in self.weight_versions)


class DataSource:
    """Groups of `size` samples of each prompt, numbered in order."""

    def __init__(self, prompts: Sequence[Sequence[int]], size: int = 2) -> None:
        self._fresh = [[Sample(g, g * size + i, tokens=list(p)) for i in range(size)] for g, p in enumerate(prompts)]
        self.buffer: list[list[Sample]] = []

    def get_samples(self, count: int) -> list[list[Sample]]:
        taken = (self.buffer + self._fresh)[:count]
        from_buffer = min(count, len(self.buffer))
        del self.buffer[:from_buffer]
        del self._fresh[: len(taken) - from_buffer]
        return taken

    def add_samples(self, groups: list[list[Sample]]) -> None:
        assert all(len(group) == 2 for group in groups), "theirs asserts the size of a group"
        self.buffer += groups


def arguments(coordinator: str, checkpoint: str, **given: Any) -> Namespace:
    """Theirs, with the defaults of their `arguments.py`."""
    defaults: dict[str, Any] = {
        "weightplane_coordinator": coordinator,
        "hf_checkpoint": checkpoint,
        "rollout_batch_size": 2,
        "over_sampling_batch_size": None,
        "n_samples_per_prompt": 2,
        "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "rollout_top_k": -1,
        "rollout_max_response_len": 4,
        "rollout_stop": None,
        "rollout_stop_token_ids": None,
        "rollout_skip_special_tokens": False,
        "partial_rollout": False,
        "mask_offpolicy_in_partial_rollout": False,
        "group_rm": False,
        "custom_rm_path": f"{__name__}.reward_of",
        "custom_generate_function_path": None,
        "dynamic_sampling_filter_path": None,
        "rollout_sample_filter_path": None,
        "rollout_all_samples_process_path": None,
    }
    return Namespace(**(defaults | given))


def word_tokenizer(directory: Path, words: int) -> str:
    """A model directory with a tokenizer: token 5 is the text `w5`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(directory)
    return str(directory)


async def reward_of(args: Namespace, sample: Sample) -> float:
    """A custom reward function: how long the response is."""
    return float(sample.response_length)


async def rewards_of(args: Namespace, group: list[Sample]) -> list[float]:
    """One for group rewards."""
    return [float(len(group))] * len(group)


async def generates_twice(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """An agent with a tool: it generates, adds the tool's token, which carries no loss, and generates again."""
    await generate(args, sample, sampling_params)
    assert sample.loss_mask is not None
    assert sample.rollout_log_probs is not None
    sample.tokens.append(11)
    sample.response_length += 1
    sample.loss_mask.append(0)
    sample.rollout_log_probs.append(0.0)
    sample.status = Sample.Status.PENDING
    return await generate(args, sample, sampling_params | {"max_new_tokens": 9})  # type: ignore[no-any-return]


async def generates_another(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """One sample in place of another."""
    return Sample(status=Sample.Status.COMPLETED)


@dataclass
class Verdict:
    """`DynamicFilterOutput`."""

    keep: bool
    reason: str | None = None


def keeps_even_groups(args: Namespace, group: list[Sample]) -> Verdict:
    """A dynamic sampling filter."""
    return Verdict(keep=(group[0].group_index or 0) % 2 == 0, reason="odd")
