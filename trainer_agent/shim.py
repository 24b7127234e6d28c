"""Between the agent and the ranks it starts: torch's elastic launcher, in a process that dies with the agent.

Promises that a fenced rank's end is told by the exit code, and restarts nothing: that is the agent's to decide. It is
an entry of its own, imported by nobody: what runs it needs neither the agent's modules nor gRPC.
"""

from __future__ import annotations

import signal
import sys

from controlplane.exit_codes import ExitCode
from controlplane.processes import set_death_signal


def main() -> int:
    """Run torch.distributed.run with this process's arguments; its exit code."""
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
