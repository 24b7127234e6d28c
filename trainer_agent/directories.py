"""The private directory of a trainer agent: its socket, its ranks' pipes, their rendezvous. Never left behind.

Promises: its name carries the process that made it and when that one started, so that `sweep` can tell the
directories of the dead, also of those that were killed, from those of the living. Those of other users are left alone,
and those from another pid namespace: of a container that shares this `/tmp` nobody here can tell who lives in it.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

import structlog

from controlplane.processes import start_time

log = structlog.get_logger(__name__)

_OURS = re.compile(r"weightplane-ns(\d+)-(\d+)-(\d+)-.+")
"""Pid namespace, pid, start. The letters keep it apart from names without a namespace, which earlier agents sweep."""


def private_directory() -> Path:
    """A new one, mode 0700. Whoever makes it outlives all who use it."""
    return Path(tempfile.mkdtemp(prefix=f"weightplane-ns{_pid_namespace()}-{os.getpid()}-{start_time(os.getpid())}-"))


def sweep() -> list[Path]:
    """Remove the directories whose makers are gone."""
    dead = [p for p in Path(tempfile.gettempdir()).iterdir() if (m := _OURS.fullmatch(p.name)) and _of_the_dead(p, m)]
    for path in dead:
        shutil.rmtree(path, ignore_errors=True)
    if dead:
        log.info("directories_swept", count=len(dead))
    return dead


def _of_the_dead(path: Path, name: re.Match[str]) -> bool:
    try:
        mine = path.stat(follow_symlinks=False).st_uid == os.geteuid()
    except OSError:
        return False
    return mine and int(name[1]) == _pid_namespace() and start_time(int(name[2])) != int(name[3])


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino
