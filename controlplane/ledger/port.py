"""The port of the ledger."""

from __future__ import annotations

from typing import Protocol

from controlplane.core.fleet_records import Record, Recovered
from controlplane.core.versions import RunId


class Ledger(Protocol):
    """Durable, ordered, one writer. Methods block; the coordinator calls them in one thread of their own."""

    def open(self, run_id: RunId) -> Recovered:
        """Begin a coordinator's life: its term is one higher than any before, on disk when this returns.

        Raises:
            LedgerError: the file is corrupt, foreign, of another run, of a newer schema, locked, or the disk is full.
                It is as it was, and closed.
        """
        ...

    def save(self, record: Record) -> None:
        """Write a record, whole; it is durable when this returns.

        Raises:
            LedgerError: nothing of it is written. Also of one that would give a number or a lower term again, or
                decide what never began.
        """
        ...

    def close(self) -> None:
        """Release the file. Idempotent."""
        ...
