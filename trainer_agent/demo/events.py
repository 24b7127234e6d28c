"""What the demo's training tells its launcher: one JSON object a line, appended and flushed at once."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import TracebackType
from typing import TextIO


class Events:
    """Written by one rank only; on the others `file` is None and nothing is written. A context manager."""

    def __init__(self, file: Path | None) -> None:
        self._out: TextIO | None = None
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._out = file.open("a", encoding="utf-8")

    def __enter__(self) -> Events:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._out is not None:
            self._out.close()

    def write(self, event: str, **fields: object) -> None:
        """`event` names what happened; `time` is seconds since 1970."""
        if self._out is not None:
            line = {"event": event, "time": round(time.time(), 3)} | fields
            self._out.write(json.dumps(line, ensure_ascii=False) + "\n")
            self._out.flush()
