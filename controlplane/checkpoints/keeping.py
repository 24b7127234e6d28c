"""What lies in a root of checkpoints: whose it is, what dead writers left, what is old, and how it goes.

A scratch directory has a name that no checkpoint can have, and a lock that lives as long as its writer. Nothing is
deleted under a checkpoint's name: it is renamed first, so that a crash in the middle leaves what the next writer
clears away.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import uuid
from contextlib import suppress
from pathlib import Path

import structlog

from controlplane.checkpoints.reading import read_manifest
from controlplane.core.errors import CheckpointUnreadable

log = structlog.get_logger(__name__)

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_SCRATCH = re.compile(r"\..+\.[0-9a-f]{32}\.tmp")
_FOREIGN = re.compile(r"[^A-Za-z0-9._-]")
_NAME_PART_LENGTH = 64


def make_scratch(root: Path, name: str) -> tuple[Path, int]:
    """A directory of one's own under a name that no checkpoint can have, and the lock that says its writer lives."""
    while True:
        path = root / f".{name}.{uuid.uuid4().hex}.tmp"
        path.mkdir()
        lock = os.open(path, _DIRECTORY)
        try:
            with suppress(OSError):  # a file system without locks: then nobody removes what is left over
                fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return path, lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)  # between the two steps somebody took it for a dead writer's


def remove_leftovers(root: Path) -> None:
    """Scratch directories whose writers are gone: the kernel let their locks go."""
    for path in root.iterdir():
        if _SCRATCH.fullmatch(path.name) is None:
            continue
        with suppress(OSError):
            lock = os.open(path, _DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def remove(root: Path, name: str) -> None:
    """Delete a checkpoint: gone in one step, so that a crash in the middle leaves what the next writer clears away."""
    scratch = root / f".{name}.{uuid.uuid4().hex}.tmp"
    with suppress(FileNotFoundError):
        (root / name).rename(scratch)
        shutil.rmtree(scratch, ignore_errors=True)


def identity(root: Path, name: str) -> tuple[str, str, int] | None:
    """Run, model and number, as its manifest says; None: it is no checkpoint."""
    try:
        manifest = read_manifest(root, name)
    except CheckpointUnreadable as error:
        log.info("no_checkpoint", name=name, cause=error.cause)
        return None
    return manifest.run_id, manifest.model, manifest.version.number


def prefix_of(run_id: str, model: str) -> str:
    """What the names of a model's checkpoints begin with. Names that are alike after the cutting differ by the sum."""
    parts = [_FOREIGN.sub("_", text)[:_NAME_PART_LENGTH] for text in (run_id, model)]
    whole = hashlib.sha256(f"{run_id}\0{model}".encode()).hexdigest()[:8]
    return f"wp-{parts[0]}-{parts[1]}-{whole}-"


def old_numbers(found: dict[str, int], committed: int, keep: int) -> set[int]:
    """Numbers to retire: beyond the `keep` newest up to the one just committed. Higher ones are of a history that the
    coordinator's ledger does not know (an older copy was accepted, or a new one begun): they are a person's."""
    numbers = sorted({n for n in found.values() if n < committed}, reverse=True)
    return set(numbers[keep - 1 :])
