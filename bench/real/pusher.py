"""A rank in a process of its own that pushes whenever it is told to, so that one benchmark can have several trainers.

    python -m bench.real.pusher ADDRESS RUN

Each line on standard input is a push, of the other version; the answer is a line with its seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import TracebackType

from bench.real.fleet import END_SECONDS, ENVIRONMENT, RUN, quiet
from bench.real.weights import Turning, model_directory, two_versions
from trainer_agent.rank import TrainerRank


class Pusher:
    """The process. `push` is its own clock's."""

    def __init__(self, address: str, run: str = RUN) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.real.pusher", address, run],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **ENVIRONMENT},
        )

    def push(self) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print("push", file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the rank that pushes ended")
        return float(line)

    def __enter__(self) -> Pusher:
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


def main() -> None:
    quiet()
    address, run = sys.argv[1:]
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the sidecar's lines are no answers
    weights = Turning(two_versions(model_directory()))
    with TrainerRank.join(address, source=weights.source(), run_id=run) as rank:
        for step, _ in enumerate(sys.stdin):
            weights.turn()
            started = time.perf_counter()
            rank.push(step)
            print(time.perf_counter() - started, file=answers, flush=True)


if __name__ == "__main__":
    main()
