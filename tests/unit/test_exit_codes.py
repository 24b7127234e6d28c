"""Exit codes are documented, and mean one thing each."""

from __future__ import annotations

import os
from pathlib import Path

from controlplane.exit_codes import ExitCode
from tests.support import exit_codes_doc

PAGE = Path(__file__).resolve().parents[2] / "docs" / "exit-codes.md"


def test_every_code_is_documented() -> None:
    if os.environ.get("WEIGHTPLANE_UPDATE_GOLDEN"):
        PAGE.write_text(exit_codes_doc.rendered())
    assert [name for name, _ in exit_codes_doc.documented()] == [code.name for code in ExitCode]
    assert PAGE.read_text() == exit_codes_doc.rendered()


def test_no_two_codes_are_one_and_none_is_a_shells() -> None:
    assert len(ExitCode.__members__) == len(set(ExitCode))
    assert all(code < 126 or code is ExitCode.INTERRUPTED for code in ExitCode)
