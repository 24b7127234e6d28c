"""What an agent must not forget over its own death: the highest terms and number that it saw (INV-7), how many lives
its engine had (L2), and who has its engine's devices.

Small JSON files, each replaced atomically and synced before anything that follows from it. The number, which grows with
every update, is written over in place in a file of its own: one write to the disk in place of three. That file is one
sector, so that a write which a crash cuts short is there or is not. It is written when a commit was taken, in a thread
beside the install, and before that version is claimed. What was decided stands also where the disk did not
take it (it is full, say): it is owed, written as soon as there is room, and until then no writer is let in (INV-7). An
end of a loan that is owed harms nobody: the note names too many, whose word a restart awaits.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import structlog

from controlplane.core.errors import LedgerError
from controlplane.whole_files import sync_directory, write_whole

log = structlog.get_logger(__name__)

RETRY_SECONDS = 1.0
"""Between two tries to write what is owed, where nothing depends on it."""


@dataclass(frozen=True, slots=True)
class Remembered:
    """Zeros mean that nothing was seen yet."""

    term: int = 0
    coordinator_term: int = 0
    number: int = 0
    lives: int = 0
    """Lives of the engine that began with this file, the present one included."""


@dataclass(frozen=True, slots=True)
class Lent:
    """Devices that are somebody else's: noted before the engine sleeps, until it is awake again or may be replaced."""

    owners: tuple[str, ...]
    """Of the holds ASLEEP."""
    term: int
    """Highest of the model that was seen by then: a coordinator that knows less says nothing of these owners."""
    device_uuids: tuple[str, ...]
    """As `EngineFacts` has them: who waits for devices has no engine to ask."""


SECTOR_BYTES = 512


class Memory:
    """The files, for one run and model: what another run left there says nothing here, and of another model of the
    same run all but its term.

    Raises LedgerError when it cannot be read or written: an agent without memory fences nobody.
    """

    def __init__(self, path: Path, run_id: str, model: str) -> None:
        """`path` is the first one's; the number, and the note of lent devices, lie beside it."""
        self._path = path
        self._number_path = path.with_suffix(".number.json")
        self._saved: Remembered | None = None
        """By this process, or None: what the first file holds is another's."""
        self._lent_path = path.with_suffix(".lent.json")
        self._run_id = run_id
        self._model = model
        self._owed: Remembered | None = None
        self._put_off: Remembered | None = None
        """A number that a thread is to write."""
        self._lock = threading.RLock()
        self._owed_lent: tuple[Lent | None] | None = None
        self._retry_at = 0.0

    def load(self) -> Remembered:
        return self._on_disk() if self._owed is None else self._owed

    def _on_disk(self) -> Remembered:
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
        remembered = replace(remembered, number=max(remembered.number, self._noted_number()))
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
        """On the disk when it returns."""
        if self._saved is not None and remembered == replace(self._saved, number=remembered.number):
            self._note_number(remembered.number)
        else:
            self._replace(self._path, asdict(remembered))
        self._saved, self._owed = remembered, None

    def remember(self, remembered: Remembered) -> None:
        """What was decided already, so nothing is raised: if the disk does not take it, it is owed."""
        with self._lock:  # a thread that writes the number is waited for
            self._put_off = None
            if remembered == self._saved and self._owed is None:
                return
            self._owed = remembered
            self._try(self.settle)

    def put_off(self, remembered: Remembered) -> bool:
        """Whether only the number grew, and nothing is owed: then `write_number` is to be called in a thread, and the
        next `remember` returns after it."""
        with self._lock:
            before = self._put_off or self._saved
            alone = before is not None and remembered == replace(before, number=remembered.number)
            if not alone or before == remembered or self._owed is not None:
                return False
            self._put_off = remembered
            return True

    def write_number(self) -> None:
        """What was put off, if it still is. Raises nothing: it may be owed then."""
        with self._lock:
            if self._put_off is not None:
                self.remember(self._put_off)

    def settle(self) -> None:
        """Before a writer is let in: what is owed of terms and numbers is on the disk when this returns (INV-7).

        Raises LedgerError.
        """
        with self._lock:
            if self._owed is not None:
                self.save(self._owed)

    def settle_soon(self) -> None:
        """Now and then, while something is owed; a thread that writes it is not waited for here."""
        owed = self._owed is not None or self._owed_lent is not None
        if owed and time.monotonic() >= self._retry_at and self._lock.acquire(blocking=False):
            try:
                self._try(self._settle_all)
            finally:
                self._lock.release()

    def _settle_all(self) -> None:
        """Loans are the loop's own: the thread that writes a number never comes here."""
        self.settle()
        if self._owed_lent is not None:
            self.note_lent(*self._owed_lent)

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except LedgerError as error:
            self._retry_at = time.monotonic() + RETRY_SECONDS
            log.error("memory_is_owed", cause=str(error))

    def _noted_number(self) -> int:
        """0 where none was noted, or another run's."""
        try:
            content = json.loads(self._number_path.read_text())
            run_id, number = content["run_id"], int(content["number"])
        except FileNotFoundError:
            return 0
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise LedgerError(path=str(self._number_path), cause=str(error)) from error
        return number if run_id == self._run_id else 0

    def _note_number(self, number: int) -> None:
        line = json.dumps({"run_id": self._run_id, "number": number}).ljust(SECTOR_BYTES - 1) + "\n"
        try:
            if not _overwrite(self._number_path, line.encode()):
                self._put(self._number_path, line)
        except OSError as error:
            raise LedgerError(path=str(self._number_path), cause=error.strerror or str(error)) from error

    def lent(self) -> Lent | None:
        """What the last life noted; what another run or model left there is none of this one's."""
        try:
            content = json.loads(self._lent_path.read_text())
            ours = (content.pop("run_id"), content.pop("model")) == (self._run_id, self._model)
            noted = Lent(tuple(content.pop("owners")), int(content.pop("term")), tuple(content.pop("device_uuids")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise LedgerError(path=str(self._lent_path), cause=str(error)) from error
        return noted if ours and noted.owners else None

    def note_lent(self, lent: Lent | None) -> None:
        """On the disk when it returns. None: they are the engine's own again. Raises LedgerError."""
        self._write_lent(lent)
        self._owed_lent = None

    def narrow_lent(self, lent: Lent | None) -> None:
        """Fewer have them than was noted, which was decided already, so nothing is raised: it may be owed."""
        self._owed_lent = (lent,)
        self._try(self._settle_all)

    def _write_lent(self, lent: Lent | None) -> None:
        if lent is not None:
            self._replace(self._lent_path, asdict(lent))
            return
        try:
            self._lent_path.unlink(missing_ok=True)
            sync_directory(self._lent_path.parent)
        except OSError as error:
            raise LedgerError(path=str(self._lent_path), cause=error.strerror or str(error)) from error

    def _replace(self, path: Path, content: dict[str, object]) -> None:
        self._put(path, json.dumps({"run_id": self._run_id, "model": self._model, **content}))

    def _put(self, path: Path, text: str) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, text, durable=True)
        except OSError as error:
            raise LedgerError(path=str(path), cause=error.strerror or str(error)) from error


def _overwrite(path: Path, line: bytes) -> bool:
    """One sector in place; False where there is no such file yet, or it is not of that size. Raises OSError."""
    try:
        descriptor = os.open(path, os.O_WRONLY)
    except FileNotFoundError:
        return False
    try:
        if len(line) != SECTOR_BYTES or os.fstat(descriptor).st_size != SECTOR_BYTES:
            return False
        os.pwrite(descriptor, line, 0)
        os.fdatasync(descriptor)
        return True
    finally:
        os.close(descriptor)
