"""What must survive the coordinator: terms, numbers, updates, what is served, which engines are known.

`Ledger` is the port; `SqliteLedger` is the real one, `MemoryLedger` its twin for tests. One contract suite runs
against both (`tests/contract/test_ledger.py`). A ledger that cannot write raises LedgerError, and the coordinator
ends: it never tells of what is not written.
"""

from controlplane.ledger.memory import MemoryLedger
from controlplane.ledger.port import Ledger
from controlplane.ledger.sqlite import SqliteLedger

__all__ = ["Ledger", "MemoryLedger", "SqliteLedger"]
