"""What one engine's processes log, in files of its own, so that a failure can be explained.

Promises that the files stay small however long the engine lives, and go with it. Two of them: errors, without their
stacks, for the text of an exception that crosses the network; and everything, for whoever reads the agent's log.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

TAIL_LINES = 12
TAIL_LINE_CHARACTERS = 300
"""Twelve such lines fit into the metadata of a gRPC error."""
LAST_LINES = 100
"""Shown of an engine that did not start."""
LIMIT_BYTES = 4 << 20
"""A file that grew beyond this is cut to its end."""
KEPT_BYTES = 64 * 1024


class EngineLog:
    """The files of one engine. `config` is what vLLM is told to log by."""

    def __init__(self, level: str) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="weightplane-vllm-"))
        self.config = self._directory / "logging.json"
        self._errors = self._directory / "errors.log"
        self._all = self._directory / "engine.log"
        self.config.write_text(json.dumps(self._dict_config(level)))

    def tail(self) -> str:
        """The last messages and exceptions, oldest first, without their stacks; empty if there are none."""
        lines = [line[:TAIL_LINE_CHARACTERS] for line in _end_of(self._errors) if not _of_a_stack(line)]
        return "\n".join(lines[-TAIL_LINES:])

    def last_lines(self, count: int = LAST_LINES) -> list[str]:
        """Of everything that was logged, oldest first."""
        return _end_of(self._all)[-count:]

    @property
    def size(self) -> int:
        """Of everything, in bytes: it grows with each line."""
        return self._all.stat().st_size if self._all.exists() else 0

    def trim(self) -> None:
        """Cut what grew too long. Its writers append, so they go on at the new end."""
        for path in (self._errors, self._all):
            if path.exists() and path.stat().st_size > LIMIT_BYTES:
                kept = "\n".join([*_end_of(path), ""])
                os.truncate(path, 0)
                with path.open("a") as file:
                    file.write(kept)

    def remove(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)

    def _dict_config(self, level: str) -> dict[str, Any]:
        terse = {"format": "%(vllm_process_name)s: %(message)s"}
        usual = {
            "class": "vllm.logging_utils.NewLineFormatter",
            "datefmt": "%m-%d %H:%M:%S",
            "format": "(%(vllm_process_name)s pid=%(process)d) %(levelname)s %(asctime)s [%(fileinfo)s:%(lineno)d] "
            "%(message)s",
        }
        stream = {"class": "logging.StreamHandler", "formatter": "usual", "stream": "ext://sys.stderr"}
        file = {"class": "logging.FileHandler", "delay": True}
        errors = file | {"formatter": "terse", "filename": str(self._errors), "level": "ERROR"}
        everything = file | {"formatter": "usual", "filename": str(self._all)}
        handlers = {"stream": stream, "errors": errors, "everything": everything}
        return {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"terse": terse, "usual": usual},
            "handlers": handlers,
            "loggers": {"vllm": {"handlers": list(handlers), "level": level, "propagate": False}},
        }


def with_log(cause: str, log: EngineLog) -> str:
    """`cause`, and what the engine's processes said last."""
    tail = log.tail()
    return f"{cause}\nthe engine's last errors:\n{tail}" if tail else cause


def _end_of(path: Path) -> list[str]:
    """Lines; none of a file that is not there."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - KEPT_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []


def _of_a_stack(line: str) -> bool:
    return line.startswith((" ", "Traceback (")) or not line
