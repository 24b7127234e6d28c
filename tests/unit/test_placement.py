"""Placement of a fleet file's processes, and what is done when they end: decisions alone, no cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from controlplane.cli.up.places import Process
from controlplane.cli.up.ray_process import command_line
from controlplane.cli.up.restarts import LONG_LIFE_SECONDS, MAX_RESTARTS, Again, Deaths, Never
from controlplane.cli.up.settings import checked, trainer_of
from controlplane.cli.up.show import show
from controlplane.config import ConfigError
from controlplane.exit_codes import ExitCode
from controlplane.fleet_file import Bundle, placed, read_fleet_file, trainers_of

FLEET = """
checkpoint_root = "kept"
[engine]
backend = "memory"
[trainer]
stop_seconds = 9.0
[[groups]]
name = "p"
count = 3
tensor_parallel_size = 2
devices = [0, 1, 2, 3, 4, 5]
[[trainers]]
name = "policy"
script = "train.py"
arguments = ["--steps", "3"]
ranks = 4
beside = ["p-0", "p-2"]
settings.max_restarts = 7
"""


def written(directory: Path, text: str = FLEET) -> Path:
    (directory / "train.py").touch()
    file = directory / "fleet.toml"
    file.write_text(text)
    return file


# ---- who goes where -----------------------------------------------------------------------------


def test_an_engine_and_the_ranks_on_its_devices_are_placed_together_and_others_alone(tmp_path: Path) -> None:
    together = placed(read_fleet_file(written(tmp_path)), gpu=False)
    assert [[b.process for b in t.bundles] for t in together] == [["p-0", "p-2", "policy"], ["p-1"]]
    assert [(t.name, t.cpus, t.gpus) for t in together] == [("policy", 6, 0), ("p-1", 1, 0)]


def test_ranks_beside_engines_take_no_gpus_of_their_own(tmp_path: Path) -> None:
    slot, alone = placed(read_fleet_file(written(tmp_path)), gpu=True)
    assert slot.bundles == (Bundle("p-0", 1, 2), Bundle("p-2", 1, 2), Bundle("policy", 4, 0))
    assert alone.bundles == (Bundle("p-1", 1, 2),)


def test_ranks_that_are_beside_nobody_take_their_own_and_the_largest_are_placed_first(tmp_path: Path) -> None:
    text = FLEET.replace('beside = ["p-0", "p-2"]', "")
    together = placed(read_fleet_file(written(tmp_path, text)), gpu=True)
    assert [(t.name, t.gpus) for t in together] == [("policy", 4), ("p-0", 2), ("p-1", 2), ("p-2", 2)]


# ---- what a trainer is given --------------------------------------------------------------------


def test_a_trainer_has_the_fleets_settings_its_own_and_its_engines_devices(tmp_path: Path) -> None:
    file = written(tmp_path)
    (trainer,) = checked(file).trainers
    settings = trainer.settings
    assert (settings.trainer_id, settings.nproc_per_node, settings.max_restarts) == ("policy", 4, 7)
    assert (settings.stop_seconds, settings.checkpoint_root) == (9.0, tmp_path / "kept")
    assert settings.state_dir == tmp_path / "weightplane-state/trainers/policy"
    assert trainer.command == (str(tmp_path / "train.py"), "--steps", "3")
    assert trainer.devices == (0, 1, 4, 5)
    assert trainers_of(read_fleet_file(file))[0].trainer_id == "policy"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (('"p-2"]', '"p-3"]'), "policy is beside p-3, and no engine of the file has this id"),
        (('"p-2"]', '"p-0"]'), "policy: beside names an engine twice"),
        (("ranks = 4", "ranks = 0"), "policy: ranks is at least 1, not 0"),
        (('name = "policy"', 'name = "p-1"'), "the name p-1 is given to a trainer and to another process"),
        (('name = "policy"', 'name = "coordinator"'), "the name coordinator is given"),
        (('name = "policy"', 'name = "../x"'), "letters, digits, dots and dashes"),
        (("max_restarts = 7", "max_restart = 7"), "trainer policy: max_restart: unknown key"),
        (('script = "train.py"', 'script = "tain.py"'), "tain.py is not there"),
        (("ranks = 4", "rank = 4"), "trainers.0.rank: unknown key; did you mean ranks?"),
    ],
)
def test_what_is_said_of_trainers_is_checked_before_anything_starts(
    tmp_path: Path, changed: tuple[str, str], said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        checked(written(tmp_path, FLEET.replace(*changed)))
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ('name = "policy"\nscript = "train.py"', "two trainers have the name policy"),
        ('name = "q"\nscript = "train.py"\nbeside = ["p-2"]', "q and policy are both beside p-2"),
    ],
)
def test_two_trainers_share_no_name_and_no_engine(tmp_path: Path, second: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        checked(written(tmp_path, f"{FLEET}[[trainers]]\n{second}\n"))


def test_a_trainer_that_the_file_does_not_have_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no trainer of the fleet file has this id; did you mean policy\?"):
        trainer_of(written(tmp_path), "polici", {})


def test_a_dry_run_shows_trainers_and_what_they_are_beside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(checked(written(tmp_path)), as_json=True)
    (trainer,) = json.loads(capsys.readouterr().out)["trainers"]
    runs = f"{tmp_path / 'train.py'} --steps 3"
    beside = ["p-0", "p-2"]
    assert trainer == {"trainer_id": "policy", "model": "policy", "ranks": "4", "runs": runs, "beside": beside}


# ---- what a node gives --------------------------------------------------------------------------


def test_on_a_node_a_process_is_told_its_address_and_the_devices_that_were_chosen() -> None:
    process = Process("p-0", ("engine", "--id", "p-0"), takes_devices=True, listens_anywhere=True)
    words = command_line(process, ["2", "3"], "10.0.0.7")
    assert words[3:] == ["--id", "p-0", "--set", "listen=10.0.0.7:0", "--set", 'vllm.visible_devices=["2", "3"]']
    plain = Process("p-0", ("engine", "--id", "p-0"))
    assert command_line(plain, ["2"], "10.0.0.7")[3:] == ["--id", "p-0"]


# ---- what is started again ----------------------------------------------------------------------


def test_inv7_a_fenced_trainer_is_never_started_again() -> None:
    assert Deaths().after(1.0).verdict(ExitCode.FENCED) == Never("a restart would not help")


@pytest.mark.parametrize("code", [ExitCode.FAILED, ExitCode.ENGINE_FAILED, ExitCode.UNREACHABLE, -9, None])
def test_what_died_or_was_lost_with_its_node_is_started_again_after_a_growing_wait(code: int | None) -> None:
    deaths, waits = Deaths(), []
    for _ in range(MAX_RESTARTS):
        deaths = deaths.after(5.0)
        verdict = deaths.verdict(code)
        assert isinstance(verdict, Again)
        waits.append(verdict.seconds)
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert deaths.after(5.0).verdict(code) == Never(f"it ended {MAX_RESTARTS + 1} times")


def test_a_long_life_begins_the_count_anew() -> None:
    tired = Deaths(MAX_RESTARTS)
    assert tired.after(LONG_LIFE_SECONDS + 1).verdict(ExitCode.FAILED) == Again(1.0)


def test_the_units_and_up_agree_about_what_a_restart_cannot_help() -> None:
    """`RestartPreventExitStatus=` of each unit, and this list."""
    units = Path(__file__).parents[2] / "deploy" / "systemd"
    said = [line for unit in units.glob("*.service") for line in unit.read_text().splitlines()]
    codes = {int(c) for line in said if line.startswith("RestartPreventExitStatus=") for c in line[25:].split()}
    assert all(isinstance(Deaths(1).verdict(code), Never) for code in codes)
    assert ExitCode.FENCED in codes
