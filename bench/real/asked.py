"""A process beside the benchmark that answers each line on its standard input with one line, until that ends."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.processes import ENVIRONMENT, STOP_SECONDS


class Asked:
    """`python -m MODULE ARGUMENTS`, ended with the block."""

    def __init__(self, module: str, *arguments: str, core: str | None = None, log: Path | None = None) -> None:
        """`core`: it stays on these, as taskset names them. `log`: of its standard error."""
        self._module = module
        self._log = log
        command = [*(["taskset", "-c", core] if core is not None else []), sys.executable, "-m", module, *arguments]
        with ExitStack() as stack:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None if log is None else stack.enter_context(log.open("wb")),
                text=True,
                env=os.environ | ENVIRONMENT,
            )

    def check(self) -> None:
        """Raises SystemExit: it ended."""
        if self._process.poll() is not None:
            last = "" if self._log is None else self._log.read_text(errors="replace")[-4000:]
            raise SystemExit(f"{self._module} ended with {self._process.returncode}:\n{last}")

    def ask(self, word: str) -> str:
        """The answer. Raises SystemExit: the process ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(word, file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._module} ended")
        return line

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        self._process.kill()
        self._process.wait()
