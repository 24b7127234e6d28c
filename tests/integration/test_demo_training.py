"""The demo's training script with real Megatron on two ranks; the fleet is stood in for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.ports import free_port
from tests.support.rank_job import run_ranks
from trainer_agent.demo.models import tiny

pytestmark = pytest.mark.real

STEPS = 5
RESUMED_STEPS = 6


def run_demo(model_dir: Path, work: Path, *options: str) -> list[dict[str, Any]]:
    """The events that this life of the run wrote."""
    events = work / "events.jsonl"
    before = len(events.read_text().splitlines()) if events.exists() else 0
    module = ["tests.support.demo_job", "--model-dir", str(model_dir), "--events", str(events)]
    module += ["--checkpoint-dir", str(work / "checkpoints"), "--export-dir", str(work / "export"), *options]
    run_ranks(module, 2, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())})
    return [json.loads(line) for line in events.read_text().splitlines()[before:]]


def named(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == name]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("models"), seed=3)


@pytest.fixture(scope="module")
def first_life(work: Path, model_dir: Path) -> list[dict[str, Any]]:
    return run_demo(model_dir, work, "--tensor-parallel", "2", "--steps", str(STEPS), "--seed", "1")


@pytest.fixture(scope="module")
def second_life(first_life: list[dict[str, Any]], work: Path, model_dir: Path) -> list[dict[str, Any]]:
    """Goes on from the first one's checkpoint, split in another way."""
    options = ["--pipeline-parallel", "2", "--steps", str(RESUMED_STEPS), "--seed", "1"]
    return run_demo(model_dir, work, *options)


def test_the_reward_on_prompts_never_trained_on_rises(first_life: list[dict[str, Any]]) -> None:
    before, after = named(first_life, "evaluated")
    assert after["reward"] >= before["reward"] + 0.15


def test_each_step_learns_from_samples_of_the_version_just_pushed(first_life: list[dict[str, Any]]) -> None:
    done = named(first_life, "step_done")
    assert [event["step"] for event in done] == list(range(1, STEPS + 1))
    assert max(event["logprob_gap"] for event in done) < 1e-4
    assert [event["versions"] for event in named(first_life, "rollout_done")] == [[n] for n in range(1, STEPS + 1)]


def test_the_first_push_comes_before_any_rollout(first_life: list[dict[str, Any]]) -> None:
    names = [event["event"] for event in first_life]
    assert names[:3] == ["started", "pushed", "evaluated"]
    assert names[-3:] == ["saved", "exported", "finished"]
    assert named(first_life, "pushed")[0]["step"] == 0


def test_a_later_life_goes_on_from_the_checkpoint_under_another_split(
    first_life: list[dict[str, Any]], second_life: list[dict[str, Any]]
) -> None:
    assert [event["event"] for event in second_life[:2]] == ["resumed", "pushed"]
    (resumed,) = named(second_life, "resumed")
    assert (resumed["step"], resumed["was_pushed_as"]) == (STEPS, named(first_life, "pushed")[-1]["version"])
    assert [event["step"] for event in named(second_life, "step_done")] == list(range(STEPS + 1, RESUMED_STEPS + 1))
    assert named(second_life, "evaluated")[0]["reward"] == named(first_life, "evaluated")[-1]["reward"]


def test_what_is_exported_is_what_the_engine_was_given_last(second_life: list[dict[str, Any]], work: Path) -> None:
    exported, held = load_file(work / "export" / "model.safetensors"), load_file(work / "engine.safetensors")
    assert exported.keys() == held.keys()
    assert all(torch.equal(exported[name], held[name]) for name in held)
