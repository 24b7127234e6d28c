"""The bar of long work: on a terminal's standard error and nowhere else, and gone when the work is over."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from contextlib import suppress

import pytest

from controlplane.cli import bar as bar_module
from controlplane.cli.bar import Bar, bar

WORK = """
import time
from controlplane.cli import bar
bar.SHOW_AFTER_SECONDS = {after}
with bar.bar("draining e0", 4.0, quiet={quiet}) as told:
    for i in range(5):
        told(float(i), "request %d is in it" % i)
        if i == 2:
            print("a line of the command", flush=True)
        time.sleep(0.05)
print("done", flush=True)
"""
CLEAR_LINE = "\x1b[2K"


def run(*, after: float = 0.0, quiet: bool = False, terminal: bool = True) -> tuple[str, str]:
    """Standard output, which is a pipe, and standard error."""
    inside, outside = pty.openpty() if terminal else os.pipe()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100"}
    command = [sys.executable, "-c", WORK.format(after=after, quiet=quiet)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=outside, env=environment, text=True)
    os.close(outside)
    written = bytearray()
    with suppress(OSError):  # a terminal whose other side is closed
        while part := os.read(inside, 65536):
            written += part
    os.close(inside)
    out, _ = process.communicate(timeout=150)
    assert process.returncode == 0
    return out, written.decode()


def test_a_terminal_sees_it_and_standard_output_has_only_what_the_command_says() -> None:
    out, error = run()
    assert out == "a line of the command\ndone\n"
    assert "draining e0" in error
    assert "request 4 is in it" in error, "the last word is drawn in any case"
    assert CLEAR_LINE in error[error.rindex("draining e0") :], "it is gone at the end"


@pytest.mark.parametrize(
    "how", [{"terminal": False}, {"quiet": True}, {"after": 60.0}], ids=["no terminal", "json", "done at once"]
)
def test_nobody_else_sees_anything(how: dict[str, float]) -> None:
    out, error = run(**how)  # type: ignore[arg-type]
    assert (out, error) == ("a line of the command\ndone\n", "")


def test_the_bar_ends_with_work_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bar_module, "SHOW_AFTER_SECONDS", 0.0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    made: list[Bar] = []

    def work() -> None:
        with bar("work") as told:
            made.append(told)
            told()
            assert told._progress is not None
            raise RuntimeError

    with pytest.raises(RuntimeError):
        work()
    assert made[0]._progress is not None
    assert not made[0]._progress.live.is_started
