"""Ties the life of a process to the one that started it.

Promises: after `die_with_parent` this process is asked to end (SIGTERM, so that it can clean up) when its parent
ends in any way, SIGKILL included, and is killed if it has not ended after a grace. A parent that was gone before the
call counts as ended. Works through a pidfd: PR_SET_PDEATHSIG fires when the *thread* that started the child ends,
and knows one signal only.
"""

from __future__ import annotations

import os
import select
import signal
import threading

GRACE_SECONDS = 20.0
"""For an orderly end: longer than each daemon's own limits for its way out."""


def die_with_parent(parent: int, *, grace_seconds: float = GRACE_SECONDS) -> None:
    """End this process when process `parent`, which must have started it, ends.

    Raises:
        ProcessLookupError: `parent` is not this process's parent, or not any more.
    """
    try:
        handle = os.pidfd_open(parent)
    except OSError as error:
        raise ProcessLookupError(f"process {parent} is not there any more") from error
    if os.getppid() != parent:  # asked after the handle was made: the pid cannot have changed hands in between
        os.close(handle)
        raise ProcessLookupError(f"process {parent} is not the parent of this one")
    threading.Thread(target=_end_with, args=(handle, grace_seconds), name="die-with-parent", daemon=True).start()


def _end_with(parent: int, grace_seconds: float) -> None:
    poll = select.poll()
    poll.register(parent, select.POLLIN)  # a pidfd becomes readable when its process ends
    poll.poll()
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(grace_seconds)
    os.kill(os.getpid(), signal.SIGKILL)
