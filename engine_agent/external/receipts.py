"""Labels that only this agent can have set. Pure.

A server keeps one free text as its weights' label, and anyone may set it. Each label that this agent sets is unique,
so the one that is read back is a receipt: the server is the one that this agent wrote to last, and nobody labelled it
since. It never says what version the server holds (INV-1); only the agent's own install does.
"""

from __future__ import annotations

import uuid

KEPT = 64
"""Receipts whose labels are remembered: as many installs may stand in the spans of one request."""
UNSET = "unset"
"""The label of a server that was attached to, and not written yet."""


class Receipts:
    """Of one life."""

    def __init__(self) -> None:
        self._labels: dict[str, str] = {}
        self._present: str | None = None

    @property
    def present(self) -> str | None:
        """What the server must show. None: whether it took the last one is not known."""
        return self._present

    def issue(self, label: str) -> str:
        """A receipt for `label`, to be sent. From here on it is not known what the server shows, until `took`."""
        receipt = f"{label}.{uuid.uuid4().hex[:12]}"
        self._labels[receipt] = label
        for old in list(self._labels)[:-KEPT]:
            del self._labels[old]
        self._present = None
        return receipt

    def took(self, receipt: str) -> None:
        """The server said that it shows it now."""
        self._present = receipt

    def label_of(self, shown: str) -> str:
        """The label that a receipt stands for; a text that is none of ours stays what it is, and equals no version."""
        return self._labels.get(shown, shown)
