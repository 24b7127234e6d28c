"""What must survive the coordinator: terms, numbers, updates, what is served, which engines are known.

`Ledger` is the port; `SqliteLedger` is the real one, `MemoryLedger` its twin for tests. One contract suite runs
against both (`tests/contract/test_ledger.py`). A ledger that cannot write raises LedgerError, and the coordinator
ends: it never tells of what is not written.

A new record is a type in `core.fleet_records`, a way into the tables (`writing`), a way back (`reading`), the same in
`memory`, and what would contradict it (`contradictions`). The tables change by a migration only, and no file of a newer
schema is ever opened. Nothing is decided here.
"""

from controlplane.ledger.memory import MemoryLedger
from controlplane.ledger.port import Ledger
from controlplane.ledger.sqlite import SqliteLedger

__all__ = ["Ledger", "MemoryLedger", "SqliteLedger"]
