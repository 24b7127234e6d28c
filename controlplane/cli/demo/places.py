"""Where a demo keeps its files, and what it leaves of them: nothing, or the directory that was asked for.

Temporary files of every process go into one private directory with a short path (a socket's may have 107 characters),
so that removing it removes what killed processes could not.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from controlplane.cli.ending import CommandFailed
from controlplane.exit_codes import ExitCode

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Places:
    """Directories and files of one demo."""

    work: Path
    scratch: Path
    """TMPDIR of every process."""

    @property
    def logs(self) -> Path:
        return self.work / "logs"

    @property
    def state(self) -> Path:
        return self.work / "state"

    @property
    def events(self) -> Path:
        return self.work / "events.jsonl"

    @property
    def exported(self) -> Path:
        """The trainer's last weights, as a model directory."""
        return self.work / "exported"

    @property
    def checkpoints(self) -> Path:
        return self.work / "checkpoints"

    @property
    def address(self) -> Path:
        """The coordinator's address, once it serves."""
        return self.work / "coordinator.address"

    @property
    def page(self) -> Path:
        """The address of its page; it is there before the coordinator's is."""
        return self.work / "page.address"


@contextmanager
def places(keep: Path | None, mark: str) -> Iterator[Places]:
    """Make the directories; at the end remove them (but `keep`), and shared memory whose name has `mark` in it.

    Raises:
        CommandFailed: `keep` cannot be made, or has something in it.
    """
    scratch = Path(tempfile.mkdtemp(prefix="weightplane-demo-"))
    try:
        made = Places(work=_kept(keep) if keep is not None else scratch / "work", scratch=scratch)
        for directory in (made.logs, made.state, made.checkpoints):
            directory.mkdir(parents=True)
        yield made
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        for segment in SHARED_MEMORY.glob(f"weightplane-*{mark}*"):
            segment.unlink(missing_ok=True)


def _kept(directory: Path) -> Path:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        used = any(directory.iterdir())
    except OSError as error:
        raise CommandFailed(ExitCode.CONFIG, f"--keep {directory}: {error.strerror}") from error
    if used:
        raise CommandFailed(ExitCode.CONFIG, f"--keep {directory}: it is not empty")
    return directory.resolve()
