"""What an agent must not forget over its own death: the highest terms and number that it saw (INV-7), and how many
lives its engine had (L2).

One small JSON file, replaced atomically and synced before anything that follows from it.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from controlplane.core.errors import LedgerError


@dataclass(frozen=True, slots=True)
class Remembered:
    """Zeros mean that nothing was seen yet."""

    term: int = 0
    coordinator_term: int = 0
    number: int = 0
    lives: int = 0
    """Lives of the engine that began with this file, the present one included."""


class Memory:
    """The file, for one run and model: what another run left there says nothing here, and of another model of the
    same run all but its term.

    Raises LedgerError when it cannot be read or written: an agent without memory fences nobody.
    """

    def __init__(self, path: Path, run_id: str, model: str) -> None:
        self._path = path
        self._run_id = run_id
        self._model = model

    def load(self) -> Remembered:
        try:
            content = json.loads(self._path.read_text())
            of_this_run = content.pop("run_id") == self._run_id
            # A file of before models were noted is of this one. A term belongs to a model, a number to the run.
            of_this_model = content.pop("model", self._model) == self._model
            remembered = Remembered(**content)
        except FileNotFoundError:
            return Remembered()
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise LedgerError(path=str(self._path), cause=str(error)) from error
        if not of_this_run:
            return Remembered()
        return remembered if of_this_model else replace(remembered, term=0)

    def begin_life(self) -> tuple[Remembered, int]:
        """Count a new life, on the disk before anybody hears of it. What is remembered, and the life's number.

        The number is 0, unknown, where nothing was remembered: perhaps an earlier disk was lost, which had counted
        further than this one will.
        """
        before = self.load()
        now = replace(before, lives=before.lives + 1)
        self.save(now)
        return now, now.lives if before != Remembered() else 0

    def save(self, remembered: Remembered) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            scratch = self._path.with_suffix(".tmp")
            with scratch.open("w") as file:
                json.dump({"run_id": self._run_id, "model": self._model, **asdict(remembered)}, file)
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
