"""Exit codes of every command and daemon: one meaning each, so that supervisors can act on them.

`RestartPreventExitStatus=66` in a systemd unit is the reason why FENCED is a number of its own: a fenced
trainer that is started again would only be fenced again, or fence its successor (INV-7).
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What a process's end means. Numbers from 64 up are ours; those of shells begin at 126."""

    OK = 0
    """Did what was asked."""
    FAILED = 1
    """Ended by an error that has no code of its own; the log says which."""
    USAGE = 2
    """The command line was wrong; nothing was started."""
    CONFIG = 64
    """A setting or a configuration file is wrong; a restart does not help."""
    PORT_IN_USE = 65
    """The address to listen on is taken, or is none of this host."""
    FENCED = 66
    """A later term was given to another trainer. Never restart (INV-7)."""
    LEASE_HELD = 67
    """Another trainer holds the lease and did not lose it in time; wait, or start with --takeover."""
    UNREACHABLE = 68
    """The coordinator did not answer in time; a restart may help."""
    ENGINE_FAILED = 69
    """The inference engine could not be started, or died too often."""
    RANKS_FAILED = 70
    """Training processes failed, more often than max_restarts allows."""
    LEDGER = 71
    """The coordinator's ledger cannot be used: corrupt, foreign, of another run, locked, or the disk is full."""
    DENIED = 72
    """What was shown, a certificate or a token, is not known there, or not allowed to do this."""
    INTERRUPTED = 130
    """Ended by SIGINT or SIGTERM, in order."""
