"""The command line: its texts, its exit codes, and that it answers at once."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from controlplane.cli.ending import CommandFailed, reported
from controlplane.cli.main import app
from controlplane.core import errors as e
from controlplane.exit_codes import ExitCode
from tests.support.golden import assert_golden

COMMANDS = [
    "coordinator",
    "engine",
    "trainer",
    "up",
    "demo",
    "status",
    "watch",
    "updates",
    "why",
    "verify",
    "doctor",
    "engines",
    "engines keep",
    "engines release",
    "engines drain",
    "engines pause",
    "engines resume",
    "engines wake",
    "engines shutdown",
    "plan",
    "rollback",
    "health",
    "ledger",
    "ledger accept",
    "certs dev",
    "token new",
]
HELP_CPU_SECONDS = 0.5
NOBODY = "127.0.0.1:1"


PLAIN = {"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"}


def weightplane(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "controlplane.cli.main", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, env=os.environ | PLAIN, check=False)


ALL_PAGES = """
import contextlib, io, json, sys
from controlplane.cli.main import app
pages = {}
for command in json.loads(sys.argv[1]):
    page = io.StringIO()
    with contextlib.redirect_stdout(page):
        try:
            app([*command.split(), "--help"], prog_name="weightplane")
        except SystemExit as ended:
            assert not ended.code, command
    pages[command] = page.getvalue()
print(json.dumps(pages))
"""


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """Every page of help, by command; of one process, since each costs its start."""
    command = [sys.executable, "-c", ALL_PAGES, json.dumps(["", *COMMANDS])]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | PLAIN, check=True)
    found: dict[str, str] = json.loads(ended.stdout)
    return found


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_reads_as_reviewed(command: str, pages: dict[str, str]) -> None:
    assert_golden(f"{'-'.join(['help', *command.split()])}.txt", pages[command])


def test_help_is_the_programs_own() -> None:
    assert_golden("help.txt", weightplane("--help").stdout)


def test_help_takes_little_time_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['weightplane', '--help']\n"
        "from controlplane.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: print(','.join(sorted({m.partition('.')[0] for m in sys.modules})))\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)

    loaded = set(ended.stdout.splitlines()[-1].split(","))
    assert not loaded & {"torch", "vllm", "megatron", "transformers", "numpy", "grpc", "google"}
    assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < HELP_CPU_SECONDS


def test_a_shell_completes_commands() -> None:
    asked = {"_WEIGHTPLANE_COMPLETE": "complete_bash", "COMP_WORDS": "weightplane w", "COMP_CWORD": "1"}
    command = [sys.executable, "-m", "controlplane.cli.main"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=150, env=os.environ | asked, check=True)
    assert ended.stdout.split() == ["watch", "why"]


def test_the_version_is_the_distributions() -> None:
    assert weightplane("--version").stdout.startswith("weightplane 0.")


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["health", "--addr", NOBODY], ExitCode.UNREACHABLE, f"nobody answers at {NOBODY}: Connection refused"),
        (["status", "--coordinator", NOBODY], ExitCode.UNREACHABLE, f"nobody answers at {NOBODY}: Connection refused"),
        (["engines", "--coordinator", NOBODY], ExitCode.UNREACHABLE, f"nobody answers at {NOBODY}: Connection refused"),
        (["rollback", "policy", "3", "--coordinator", NOBODY], ExitCode.UNREACHABLE, f"nobody answers at {NOBODY}"),
        (["ledger", "accept", "--coordinator", NOBODY], ExitCode.UNREACHABLE, f"nobody answers at {NOBODY}"),
        (["coordinator", "--set", "liste=1"], ExitCode.CONFIG, "liste: unknown key; did you mean listen?"),
        (["coordinator", "--set", "nothing"], ExitCode.CONFIG, "nothing: expected KEY=VALUE"),
        (["coordinator", "--config", "none.toml"], ExitCode.CONFIG, "none.toml: cannot be read"),
        (["coordinator", "--listen", "0.0.0.0:0"], ExitCode.CONFIG, "listen: other hosts reach 0.0.0.0:0"),
        (["coordinator", "--set", "tls.cert=a"], ExitCode.CONFIG, "tls: tls.cert and tls.key go together"),
        (["--tls-cert", "a", "status"], ExitCode.CONFIG, "--tls-cert and --tls-key go together"),
        (["certs", "dev", "/dev/null/x"], ExitCode.FAILED, "[Errno 20] Not a directory"),
        (["certs", "dev", "x", "--node", "engine"], ExitCode.USAGE, "--node is ROLE/NAME"),
        (["token", "new", "--role", "king", "--name", "x"], ExitCode.USAGE, "a role is one of coordinator, trainer"),
        (["token", "new", "--role", "admin", "--name", "a b"], ExitCode.USAGE, "'a b' is no name of an identity"),
        (["coordinator", "--die-with-parent", "1"], ExitCode.FAILED, "process 1 is not the parent of this one"),
    ],
)
def test_an_expected_error_is_one_line_and_a_code(words: list[str], code: int, line: str) -> None:
    ended = weightplane(*words)
    assert ended.returncode == code
    assert ended.stderr.startswith(f"weightplane: {line}")
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "words",
    [
        ["demo", "--steps", "0"],
        ["demo", "--model", "huge"],
        ["no-such-command"],
        ["rollback", "policy"],
        ["rollback", "policy", "0"],
        ["status", "--coordinator", "no-port"],
        ["status", "--timeout", "0"],
        ["coordinator", "--log-level", "LOUD"],
        ["engine", "--member-of", "p-0"],
        ["engine", "--member-of", "p-0", "--head", "h:1", "--id", "p-0"],
        ["engine", "--member-of", "p-0", "--head", "h:1", "--fleet", "f.toml", "--config", "c.toml"],
    ],
)
def test_a_wrong_command_line_is_code_2_and_no_traceback(words: list[str]) -> None:
    ended = weightplane(*words)
    assert ended.returncode == ExitCode.USAGE
    assert "Traceback" not in ended.stderr


def test_a_trainer_without_a_script_is_told_how(tmp_path: Path) -> None:
    config = tmp_path / "trainer.toml"
    config.write_text('coordinator = "127.0.0.1:1"\n')
    ended = weightplane("trainer", "--config", str(config))
    assert ended.returncode == ExitCode.USAGE
    assert "weightplane trainer -- train.py" in ended.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (e.StaleTerm(model="policy", got=1, current=2), ExitCode.FENCED),
        (
            e.LeaseHeld(model="policy", holder="t", incarnation="i", term=1, remaining_seconds=3.0),
            ExitCode.LEASE_HELD,
        ),
        (e.EngineDied(engine_id="a", cause="signal 9"), ExitCode.ENGINE_FAILED),
        (e.PeerLost(peer="coordinator", cause="refused"), ExitCode.UNREACHABLE),
        (e.WrongRun(expected="a", got="b"), ExitCode.FAILED),
        (e.Unauthenticated(cause="no token"), ExitCode.DENIED),
        (e.PermissionDenied(method="/a/B", caller="c", wanted="admin", had="viewer"), ExitCode.DENIED),
        (e.TlsFailed(peer="coordinator", cause="expired"), ExitCode.UNREACHABLE),
        (CommandFailed(ExitCode.RANKS_FAILED, "two ranks failed"), ExitCode.RANKS_FAILED),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED),
    ],
)
def test_each_error_has_its_code(error: BaseException, code: ExitCode) -> None:
    assert _code_of(error) == code


def test_an_error_that_is_none_of_ours_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        _code_of(ZeroDivisionError())


def _code_of(error: BaseException) -> int:
    import typer

    @reported
    def command() -> int:
        raise error

    with pytest.raises(typer.Exit) as caught:
        command()
    return int(caught.value.exit_code)


def test_a_trainers_flags_are_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    async def run(settings: Any, command: list[str]) -> int:
        told.append((settings.takeover, settings.insecure, settings.coordinator, command))
        return 0

    monkeypatch.setattr("trainer_agent.agent.run_trainer", run)
    for flags in ([], ["--takeover", "--coordinator", "c:1"]):
        with pytest.raises(SystemExit):
            app(["trainer", *flags, "--", "train.py"], prog_name="weightplane")
    assert told == [(False, False, "127.0.0.1:7070", ["train.py"]), (True, False, "c:1", ["train.py"])]
