"""torch's elastic launcher as a child of the trainer agent: `python -m trainer_agent.agent.elastic`. Not for people.

Dies with the agent, and tells a fenced rank's end by its exit code. A module of its own, which nothing imports: Python
warns of a module that is run and was imported before.
"""

from __future__ import annotations

import signal
import sys

from controlplane.exit_codes import ExitCode
from controlplane.processes import set_death_signal


def main() -> int:
    """Runs torch.distributed.run with this process's arguments."""
    set_death_signal(signal.SIGTERM)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(sys.argv[1:])
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        codes = {f.exitcode for f in error.failures.values()}
        return ExitCode.FENCED if ExitCode.FENCED in codes else ExitCode.RANKS_FAILED
    except SignalException:
        return ExitCode.INTERRUPTED
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
