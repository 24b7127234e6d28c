"""Engines of many processes, without any: who is asked, how answers are counted, and what settings mean."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from controlplane.core.canary import Canary
from controlplane.core.errors import EngineDied
from controlplane.fleet_file.settings import GroupSettings
from engine_agent.vllm.calls import Core
from engine_agent.vllm.canary import CanarySilent, _agreed
from engine_agent.vllm.engine_log import EngineLog
from engine_agent.vllm.headless import headless_from_json, settings_to_json
from engine_agent.vllm.ranks import rank_in_engine
from engine_agent.vllm.settings import Nodes, VllmSettings, engine_arguments

SPANNING = VllmSettings(
    Path("/models/tiny"),
    data_parallel_size=4,
    further_nodes=1,
    node_address="10.0.0.1",
    visible_devices=("0", "1"),
    vllm_arguments={"seed": 3},
)


def core_of(answers: list[list[dict[str, Any]]], cores: int) -> Core:
    """A core client whose cores answer so, each with the workers of one core."""

    async def call_utility_all_async(*_: object) -> list[list[dict[str, Any]]]:
        return answers

    parallel = SimpleNamespace(data_parallel_size=cores, world_size=2)
    llm = SimpleNamespace(
        errored=False,
        vllm_config=SimpleNamespace(parallel_config=parallel),
        engine_core=SimpleNamespace(call_utility_all_async=call_utility_all_async),
    )
    return Core(llm, "e0", EngineLog("INFO"), lambda _: None)


def ranks(*numbers: int) -> list[dict[str, Any]]:
    return [{"rank": n} for n in numbers]


async def test_g4_answers_are_taken_from_every_core_and_counted_against_all_workers() -> None:
    core = core_of([ranks(2, 3), ranks(1, 0)], cores=2)
    assert await core.collect("facts", 1.0) == ranks(0, 1, 2, 3)
    core.close()


@pytest.mark.parametrize("answers", [[ranks(0, 1)], [ranks(0, 1), ranks(2)], [ranks(0, 1), ranks(0, 1)]])
async def test_g4_a_worker_that_does_not_answer_or_answers_as_another_is_a_death(answers: Any) -> None:
    core = core_of(answers, cores=2)
    with pytest.raises(EngineDied, match="of 4 workers answered"):
        await core.collect("facts", 1.0)
    core.close()


def test_workers_are_numbered_through_all_cores() -> None:
    parallel = [SimpleNamespace(data_parallel_index=c, world_size=2, rank=r) for c in range(2) for r in range(2)]
    assert [rank_in_engine(p) for p in parallel] == [0, 1, 2, 3]


def test_cores_that_say_other_things_fail_the_canary_and_rounding_does_not() -> None:
    said = Canary((-1.0, -2.0), (5,))
    assert _agreed([said, replace(said, prompt_logprobs=(-1.03, -2.0))]) == said
    with pytest.raises(CanarySilent, match=r"core 2 says other than core 0: 0\.500"):
        _agreed([said, said, replace(said, prompt_logprobs=(-1.0, -2.5))])


def test_an_engine_of_one_core_meets_nobody() -> None:
    arguments = engine_arguments(VllmSettings(Path("/models/tiny")), gpu=False)
    assert arguments["data_parallel_size"] == 1
    assert not {name for name in arguments if name.startswith("data_parallel_")} - {"data_parallel_size"}


def test_each_node_has_its_share_of_the_cores() -> None:
    assert (SPANNING.cores_each, SPANNING.world_size) == (2, 4)
    here = engine_arguments(SPANNING, gpu=False, nodes=Nodes("10.0.0.1", 7777))
    there = engine_arguments(SPANNING, gpu=False, nodes=Nodes("10.0.0.1", 7777, 2))
    assert {n: there[n] for n in there.keys() - here.keys()} == {"data_parallel_start_rank": 2}
    assert here["data_parallel_size_local"] == there["data_parallel_size_local"] == 2


def test_a_member_is_told_the_engines_settings_but_not_its_devices() -> None:
    told = {"settings": json.loads(settings_to_json(SPANNING)), "address": "10.0.0.1", "port": 7777, "first_core": 2}
    cores = headless_from_json(json.dumps(told))
    assert cores.settings == replace(SPANNING, visible_devices=())
    assert cores.nodes == Nodes("10.0.0.1", 7777, 2)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"data_parallel_size": 3}, "3 cores cannot be shared by 2 nodes"),
        ({"node_address": ""}, "needs node_address"),
        ({"data_parallel_size": 0}, "at least 1"),
    ],
)
def test_g4_sizes_that_do_not_fit_are_refused_with_the_numbers(changed: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        replace(SPANNING, **changed)


def test_a_groups_devices_are_counted_for_every_core() -> None:
    group = GroupSettings("policy", tensor_parallel_size=2, vllm={"data_parallel_size": 2}, devices=(0, 1, 2, 3))
    assert group.devices_each == 4
    with pytest.raises(ValueError, match="need 4"):
        replace(group, devices=(0, 1))
