"""A process beside the benchmark that answers each line on its standard input with one line, until that ends."""

from __future__ import annotations

import os
import subprocess
import sys
from types import TracebackType
from typing import Self

from bench.real.fleet import END_SECONDS, ENVIRONMENT


class Asked:
    """`python -m MODULE ARGUMENTS`, ended with the block."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._module = module
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **ENVIRONMENT},
        )

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
        try:
            self._process.wait(END_SECONDS)
        finally:
            self._process.kill()
            self._process.wait()
