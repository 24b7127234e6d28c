"""Whether a process that ended is started again, and when. Pure: the same answer wherever the process ran."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.exit_codes import ExitCode

FIRST_WAIT_SECONDS = 1.0
LONGEST_WAIT_SECONDS = 30.0
"""Before a process is started again; doubled in between."""
MAX_RESTARTS = 5
"""In a row: of a process that lived LONG_LIFE_SECONDS the next death counts as its first."""
LONG_LIFE_SECONDS = 600.0
FINAL = frozenset(
    {
        ExitCode.OK,
        ExitCode.USAGE,
        ExitCode.CONFIG,
        ExitCode.PORT_IN_USE,
        ExitCode.FENCED,
        ExitCode.LEASE_HELD,
        ExitCode.LEDGER,
    }
)
"""Ends after which the same start would end the same. FENCED above all: a fenced trainer that is started again would
be fenced again, or fence its successor (INV-7)."""


@dataclass(frozen=True, slots=True)
class Again:
    """It is started again after a wait."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Never:
    """It stays down."""

    why: str


@dataclass(frozen=True, slots=True)
class Deaths:
    """How often one process ended in a row."""

    count: int = 0

    def after(self, lived_seconds: float) -> Deaths:
        """One more; the first again where it lived long."""
        return Deaths(1 if lived_seconds > LONG_LIFE_SECONDS else self.count + 1)

    def verdict(self, code: int | None) -> Again | Never:
        """Of an end with `code`. None: it was lost with its node, and what its code would have been nobody knows."""
        if code in FINAL:
            return Never("a restart would not help")
        if self.count > MAX_RESTARTS:
            return Never(f"it ended {self.count} times")
        return Again(min(FIRST_WAIT_SECONDS * 2 ** (self.count - 1), LONGEST_WAIT_SECONDS))
