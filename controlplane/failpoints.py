"""Named points at which a test may make a real process fail.

Off unless WEIGHTPLANE_FAILPOINTS_DIR is set. A point is armed by a file of its name in that directory and
is consumed (unlinked) when it fires, so it fires once in one process. The file's text is the action:

    kill [after=N]      SIGKILL this process
    stop [after=N]      SIGSTOP this process
    raise [after=N]     raise Injected
    sleep=SECONDS [after=N]   block this thread
    hold [after=N]      create `<name>.reached` beside the point, block this thread until `<name>.go` appears there

A hold is for killing another process at that phase; whoever forgets to let go is waited for 10 s, no longer.

`after=N` fires only where the caller's count is at least N (chunks sent, tensors loaded).
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

DIRECTORY_VARIABLE = "WEIGHTPLANE_FAILPOINTS_DIR"
HOLD_SECONDS = 10.0
"""Longest time of a hold."""
LOOK_SECONDS = 0.01


class Injected(RuntimeError):
    """The failure that a test asked for."""


def hit(name: str, count: int = 0) -> None:
    """Fail here if the point `name` is armed for `count`. Raises Injected."""
    directory = os.environ.get(DIRECTORY_VARIABLE)
    if directory is None:
        return
    point = Path(directory) / name
    try:
        words = point.read_text().split()
    except FileNotFoundError:
        return
    options = dict(w.split("=", 1) for w in words if "=" in w)
    if not words or count < int(options.get("after", "0")):  # no words: its file is still being written
        return
    try:
        point.unlink()  # only one process wins the point
    except FileNotFoundError:
        return
    _act(point, words[0], options)


def _act(point: Path, action: str, options: dict[str, str]) -> None:
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action.startswith("sleep="):
        time.sleep(float(options["sleep"]))
    elif action == "hold":
        _hold(point)
    else:
        raise Injected(f"failpoint {point.name}")


def _hold(point: Path) -> None:
    """Whatever runs in this thread stands still: with a daemon's event loop the whole daemon, as it is meant."""
    go = point.with_name(f"{point.name}.go")
    point.with_name(f"{point.name}.reached").touch()
    deadline = time.monotonic() + HOLD_SECONDS
    while not go.exists() and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
