"""How many names a message lists: a fleet's message is read by a person, and travels in the headers of an answer."""

from __future__ import annotations

from collections.abc import Iterable

NAMES_SHOWN = 5
"""Names listed in a message; `metadata()` gives the whole count."""
TEXT_LIMIT = 1000
"""Characters of one text of an error on the wire: its status, its reason and all its values share 8 KiB there."""


def some(items: Iterable[object], separator: str = ", ", most: int = NAMES_SHOWN) -> str:
    """The first ones, and how many more there are."""
    texts = [str(item) for item in items]
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return separator.join(texts[:most]) + more


def cut(text: str, most: int = TEXT_LIMIT) -> str:
    """The beginning, and how much is left out."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most} characters more)"
