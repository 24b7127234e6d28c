"""What of the examples needs no engine and no Megatron: their fleets, their sums, their words."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from controlplane.cli.up.settings import checked
from examples import async_grpo, async_rollouts, distill, policy, run, sync_grpo
from examples.async_rollouts import Account
from examples.distill import Scored
from trainer_agent.demo.rollout_worker import Rollout

EXAMPLES: list[Any] = [sync_grpo, async_grpo, distill]


def rollout(tokens: int, versions: tuple[int, ...] = (1,)) -> Rollout:
    return Rollout((1, 2), tuple(range(tokens)), (-1.0,) * tokens, versions, "policy-0")


@pytest.mark.parametrize(("name", "models"), [("sync_grpo", ["policy"] * 2), ("distill", ["policy", "teacher"])])
def test_the_fleet_that_an_example_starts_is_one_that_up_takes(tmp_path: Path, name: str, models: list[str]) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(run.fleet_toml(name, "127.0.0.1:7070", tmp_path / "student", tmp_path / "teacher"))
    fleet = checked(file)
    assert [engine.model for engine in fleet.engines] == models
    assert [engine.initial == "serve" for engine in fleet.engines] == [model == "teacher" for model in models]


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_says_what_it_shows_and_the_command(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"python -m examples.run {example.__name__.removeprefix('examples.')}" in example.__doc__
    options = policy.parse(example.__doc__, example.STEPS, ["--model-dir", "model", "--seed", "3"])
    assert (options.model_dir, options.steps, options.seed) == (Path("model"), example.STEPS, 3)
    with pytest.raises(SystemExit):
        policy.parse(example.__doc__, example.STEPS, ["--help"])
    assert example.__doc__.splitlines()[0].split()[0] in capsys.readouterr().out


def test_the_launcher_refuses_what_is_no_example() -> None:
    words = [sys.executable, "-m", "examples.run", "something"]
    found = subprocess.run(words, capture_output=True, text=True, timeout=150, check=False)
    assert found.returncode == 2
    assert "sync_grpo" in found.stderr


def test_seconds_count_as_overlap_where_rollouts_and_training_both_ran() -> None:
    assert async_grpo.overlap([(0.0, 4.0), (6.0, 9.0)], [(3.0, 7.0), (8.0, 20.0)]) == pytest.approx(1 + 1 + 1)
    assert async_grpo.overlap([(0.0, 1.0)], [(1.0, 2.0)]) == 0.0


def test_the_report_has_the_histogram_the_overlap_and_what_was_dropped() -> None:
    account = Account([(0.0, 3.0)], Counter({1: 30, 0: 10}), Counter({("lag", 1): 2}))
    assert async_grpo.report(account, [(1.0, 5.0)], seconds=4.0) == [
        "40 tokens trained on, in 4 s: 10 tokens/s",
        "rollouts were in flight for 2.0 of 4.0 s of training (50%)",
        "lag 0: ##########                               10 tokens (25%)",
        "lag 1: ##############################           30 tokens (75%)",
        "dropped as too old: 2 samples; at most 1 behind is allowed",
    ]


def test_a_batchs_makers_are_all_versions_in_it() -> None:
    assert async_grpo.makers([[rollout(2, (3,)), rollout(2, (2, 3))], [rollout(2, (4,))]]) == "2, 3, 4"


def test_prompts_come_in_another_order_each_time_round_and_none_is_left_out() -> None:
    prompts = [(n,) for n in range(20)]
    drawn = list(itertools.islice(async_rollouts.shuffled(prompts, seed=1), 40))
    assert sorted(drawn[:20]) == sorted(drawn[20:]) == prompts
    assert drawn[:20] != drawn[20:]
    assert drawn == list(itertools.islice(async_rollouts.shuffled(prompts, seed=1), 40))


def test_the_kl_is_how_much_less_probable_the_students_tokens_are_to_the_teacher() -> None:
    assert distill.kl([Scored(rollout(2), (-3.0, -1.0)), Scored(rollout(2), (-2.0, -2.0))]) == pytest.approx(1.0)


def test_a_score_that_lacks_a_token_is_an_error_and_no_number() -> None:
    with pytest.raises(ValueError, match="zip"):
        distill.kl([Scored(rollout(2), (-3.0,))])


def test_each_token_has_its_own_advantage_and_the_prompt_has_none() -> None:
    stand_in = cast(policy.Policy, SimpleNamespace(longest=4))
    batch = distill.batch_of(stand_in, [Scored(rollout(2), (-3.0, 1.0)), Scored(rollout(1), (-1.5,))])
    assert batch.advantages.tolist() == [[0.0, -2.0, 2.0, 0.0], [0.0, -0.5, 0.0, 0.0]]


def test_no_grpc_lives_in_an_examples_training_process() -> None:
    code = "import sys, examples.sync_grpo, examples.async_grpo, examples.distill; print('grpc' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout == "False\n"


def test_the_loop_of_the_docs_adds_few_lines_of_ours_to_a_trainer_and_takes_nothing_of_the_demo() -> None:
    text = Path(run.__file__).with_name("megatron_loop.py").read_text()
    code = [line for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
    assert len(code) < 80
    assert text.count("# Weightplane: ") == 4
    assert "demo" not in text.partition('"""')[2].partition('"""')[2], "after its docstring"
