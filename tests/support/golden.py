"""Texts that people see, kept as files beside the tests and reviewed like code.

`WEIGHTPLANE_UPDATE_GOLDEN=1 pytest …` writes them anew; the difference is then for review.
"""

from __future__ import annotations

import os
from pathlib import Path

DIRECTORY = Path(__file__).resolve().parent.parent / "golden"


def assert_golden(name: str, text: str) -> None:
    """`text` is what `tests/golden/NAME` holds. Spaces at the ends of lines do not count."""
    file = DIRECTORY / name
    got = "".join(line.rstrip() + "\n" for line in text.splitlines())
    if os.environ.get("WEIGHTPLANE_UPDATE_GOLDEN"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(got)
    assert got == file.read_text(), f"{file} differs; WEIGHTPLANE_UPDATE_GOLDEN=1 writes it anew"
