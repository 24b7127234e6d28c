"""Whose ranks this agent started last: so that it can prove them dead, and its successor life gets the lease at once.

A note of one life's processes, by pid and start time, on disk where a state directory is given: an agent that was
killed itself (its ranks die with it) proves it after its restart. Refuses to guess: one process that may live, a note
that cannot be read, or one of another host, whose processes nobody sees from here, proves nothing (INV-7).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog

from controlplane.devices import host_id
from controlplane.processes import start_time

log = structlog.get_logger(__name__)

FILE_NAME = "trainer-life.json"


@dataclass(frozen=True, slots=True)
class _Life:
    incarnation: str
    processes: tuple[tuple[int, int], ...]
    """(pid, start time) of each rank."""
    host_id: str
    """Where they run: the directory may lie on storage that several hosts share."""


class LastLife:
    """The note. Written before a life's first push, read before the next one's hello."""

    def __init__(self, directory: Path | None) -> None:
        self._path = directory / FILE_NAME if directory else None
        self._life = self._read()

    def begin(self, incarnation: str, pids: Iterable[int]) -> None:
        """A new life holds the lease."""
        started = ((pid, start_time(pid)) for pid in pids)
        self._life = _Life(incarnation, tuple((pid, at) for pid, at in started if at is not None), host_id())
        if self._path is not None:
            self._write(self._path, self._life)

    def ended_incarnation(self) -> str:
        """The last life, if every process of it has ended; else empty."""
        if self._life is None or self._life.host_id != host_id():
            return ""
        if any(start_time(pid) == at for pid, at in self._life.processes):
            return ""
        return self._life.incarnation

    def _read(self) -> _Life | None:
        if self._path is None:
            return None
        try:
            note = json.loads(self._path.read_text())
            return _Life(
                str(note["incarnation"]), tuple((int(p), int(at)) for p, at in note["processes"]), str(note["host_id"])
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("last_life_unreadable", path=str(self._path), cause=str(error))
            return None

    def _write(self, path: Path, life: _Life) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(asdict(life)))
        draft.replace(path)
