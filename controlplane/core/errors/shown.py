"""How many names a message lists: a fleet's message is read by a person, and travels in the headers of an answer."""

from __future__ import annotations

from collections.abc import Iterable

NAMES_SHOWN = 5
"""Names listed in a message; `metadata()` gives the whole count."""
TEXT_LIMIT = 900
"""Bytes of one text of an error on the wire: its words and all its values share 8 KiB of headers there."""


def some(items: Iterable[object], separator: str = ", ", most: int = NAMES_SHOWN) -> str:
    """The first ones, and how many more there are."""
    texts = [str(item) for item in items]
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return separator.join(texts[:most]) + more


def cut(text: str, most: int = TEXT_LIMIT) -> str:
    """The beginning, and how much is left out. `most`: bytes, as headers write them (`%C3%A9` for a letter)."""
    for at, character in enumerate(text):
        most -= 1 if " " <= character <= "~" else 3 * len(character.encode(errors="replace"))
        if most < 0:
            return f"{text[:at]}... ({len(text) - at} characters more)"
    return text
