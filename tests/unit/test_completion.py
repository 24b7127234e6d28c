"""Shell completion in a real shell: installed as people install it, in a home of its own, and then asked."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
bash = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
ASK = """
source "$HOME/.bashrc"
function=$(complete -p weightplane | sed 's/.*-F \\([^ ]*\\).*/\\1/')
while read -ra COMP_WORDS; do
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
  $function weightplane
  echo "${COMPREPLY[@]}"
done
"""
ANSWERS = {
    "weightplane do": {"doctor"},
    "weightplane engines dr": {"drain"},
    "weightplane doctor --li": {"--link"},
    "weightplane --tls-c": {"--tls-ca", "--tls-cert"},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("home")
    in_bash(directory, "weightplane --install-completion; true")  # two commands: else the shell becomes the first one
    return directory


def in_bash(home: Path, script: str, typed: str = "") -> str:
    environment = os.environ | {"HOME": str(home), "PATH": f"{BIN}:{os.environ['PATH']}"}
    command = ["bash", "-c", script]
    ended = subprocess.run(
        command, input=typed, capture_output=True, text=True, timeout=150, env=environment, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@bash
def test_bash_completes_commands_and_options_once_it_was_installed(home: Path) -> None:
    lines = in_bash(home, ASK, "".join(f"{words}\n" for words in ANSWERS)).splitlines()
    assert [set(line.split()) for line in lines] == list(ANSWERS.values())


@bash
def test_installing_twice_leaves_one_line_in_the_shells_file(home: Path) -> None:
    in_bash(home, "weightplane --install-completion; true")
    assert (home / ".bashrc").read_text().count("weightplane") == 1


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_each_other_shell_is_answered_with_commands(shell: str) -> None:
    typer = {"_TYPER_COMPLETE_ARGS": "weightplane ver", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    ended = subprocess.run(
        [sys.executable, "-m", "controlplane.cli.main"],
        capture_output=True,
        text=True,
        timeout=150,
        env=os.environ | typer | {"_WEIGHTPLANE_COMPLETE": f"complete_{shell}"},
        check=False,
    )
    assert "verify" in ended.stdout
    assert "watch" not in ended.stdout
