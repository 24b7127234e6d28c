"""What users' type checkers see of `weightplane`. mypy judges the bodies, which are never run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, assert_type

import weightplane

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from trainer_agent.source import WeightSource
    from weightplane import (
        Admitted,
        BlockingRolloutClient,
        Delta,
        IterableSource,
        LagGuard,
        MegatronSource,
        ModuleSource,
        PendingPush,
        PushReport,
        RolloutClient,
        Sample,
        SamplingSettings,
        Scores,
        TrainerRank,
        WithDraft,
    )


def a_trainer(rank: TrainerRank, step: int) -> None:
    assert_type(rank.push(step), PushReport)
    assert_type(rank.push_async(step), PendingPush)
    assert_type(rank.push_async(step).applied(), PushReport)
    assert_type(rank.give_devices(), dict[str, str])


def sources(
    megatron: MegatronSource, module: ModuleSource, iterable: IterableSource, both: WithDraft
) -> list[WeightSource]:
    return [megatron, module, iterable, both]


async def rollouts(client: RolloutClient, prompt: Sequence[int], sampling: SamplingSettings) -> None:
    assert_type(await client.generate(prompt, sampling), Sample)
    assert_type(client.stream(prompt, sampling), AsyncGenerator[Delta])
    assert_type(await client.score(prompt), Scores)


def blocking(client: BlockingRolloutClient, prompt: Sequence[int], sampling: SamplingSettings) -> Sample:
    return client.generate(prompt, sampling)


def admission(guard: LagGuard, sample: Sample) -> Admitted | None:
    return guard.admit(sample)


def test_the_package_says_that_it_is_typed() -> None:
    home = weightplane.__spec__.submodule_search_locations
    assert home is not None
    assert (Path(home[0]) / "py.typed").exists()
