"""Runs commands of ours one after the other in this one process, which imports things once.

    python -m tests.support.run_commands '[["DIRECTORY", ["weightplane", "status"]], …]'

A command is `weightplane` with words, or `python` with a file. Prints one JSON list: of each its exit code and all
that it printed.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
from collections.abc import Sequence

from controlplane.cli.main import app


def run(directory: str, words: Sequence[str]) -> tuple[int, str]:
    os.chdir(directory)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            if words[0] == "weightplane":
                app(words[1:], prog_name="weightplane")
            else:
                runpy.run_path(words[1], run_name="__main__")
        except SystemExit as ended:
            return ended.code if isinstance(ended.code, int) else 0, said.getvalue()
    return 0, said.getvalue()


if __name__ == "__main__":
    print(json.dumps([run(directory, words) for directory, words in json.loads(sys.argv[1])]))
