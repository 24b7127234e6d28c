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
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
"$(complete -p weightplane | sed 's/.*-F \\([^ ]*\\).*/\\1/')" weightplane
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("home")
    in_bash(directory, "weightplane --install-completion; true")  # two commands: else the shell becomes the first one
    return directory


def in_bash(home: Path, script: str) -> str:
    environment = os.environ | {"HOME": str(home), "PATH": f"{BIN}:{os.environ['PATH']}"}
    ended = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@bash
@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("weightplane do", {"doctor"}),
        ("weightplane engines dr", {"drain"}),
        ("weightplane doctor --li", {"--link"}),
        ("weightplane why --st", {"--stacks"}),
        ("weightplane --tls-c", {"--tls-ca", "--tls-cert"}),
    ],
)
def test_bash_completes_commands_and_options_once_it_was_installed(home: Path, words: str, wanted: set[str]) -> None:
    assert set(in_bash(home, ASK.format(words=words)).split()) == wanted


@bash
def test_installing_twice_leaves_one_line_in_the_shells_file(home: Path) -> None:
    in_bash(home, "weightplane --install-completion; true")
    assert (home / ".bashrc").read_text().count("weightplane") == 1


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_is_answered_with_commands(shell: str) -> None:
    asked = {"bash": "complete_bash", "zsh": "complete_zsh", "fish": "complete_fish"}[shell]
    words = {"COMP_WORDS": "weightplane ver", "COMP_CWORD": "1"}
    typer = {"_TYPER_COMPLETE_ARGS": "weightplane ver", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    ended = subprocess.run(
        [sys.executable, "-m", "controlplane.cli.main"],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | words | typer | {"_WEIGHTPLANE_COMPLETE": asked},
        check=False,
    )
    assert "verify" in ended.stdout
    assert "watch" not in ended.stdout
