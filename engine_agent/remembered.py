"""What an agent must not forget over its own death: the highest terms and number that it saw (INV-7).

One small JSON file, replaced atomically and synced before anything that follows from it.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from controlplane.core.errors import LedgerError


@dataclass(frozen=True, slots=True)
class Remembered:
    """Zeros mean that nothing was seen yet."""

    term: int = 0
    coordinator_term: int = 0
    number: int = 0


class Memory:
    """The file, for one run: what another run left there says nothing here.

    Raises LedgerError when it cannot be read or written: an agent without memory fences nobody.
    """

    def __init__(self, path: Path, run_id: str) -> None:
        self._path = path
        self._run_id = run_id

    def load(self) -> Remembered:
        try:
            content = json.loads(self._path.read_text())
            of_this_run = content.pop("run_id") == self._run_id
            return Remembered(**content) if of_this_run else Remembered()
        except FileNotFoundError:
            return Remembered()
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise LedgerError(path=str(self._path), cause=str(error)) from error

    def save(self, remembered: Remembered) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            scratch = self._path.with_suffix(".tmp")
            with scratch.open("w") as file:
                json.dump({"run_id": self._run_id, **asdict(remembered)}, file)
                file.flush()
                os.fsync(file.fileno())
            scratch.rename(self._path)
            _sync_directory(self._path.parent)
        except OSError as error:
            raise LedgerError(path=str(self._path), cause=error.strerror or str(error)) from error


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
