"""A rank in a process of its own that pushes whenever it is told to, so that one benchmark can have several trainers.

    python -m bench.real.pusher ADDRESS RUN

Each line on standard input is a push, of the other version; the answer is a line with its seconds.
"""

from __future__ import annotations

import os
import sys
import time

from bench.real.asked import Asked
from bench.real.fleet import RUN, quiet
from bench.real.weights import Turning, model_directory, two_versions
from trainer_agent.rank import TrainerRank


class Pusher(Asked):
    """The process. `push` is its own clock's."""

    def __init__(self, address: str, run: str = RUN) -> None:
        super().__init__("bench.real.pusher", address, run)

    def push(self) -> float:
        """Seconds."""
        return float(self.ask("push"))


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
