"""docs/architecture.md shows the imports as they are, and names files and functions that exist."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.support import import_map

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"
BETWEEN = re.compile(r"(<!-- imports: [^\n]*-->\n).*(<!-- imports end -->)", re.DOTALL)
PLACE = re.compile(r"`((?:controlplane|engine_agent|trainer_agent|protos|tests)/[\w/.]*)`((?: `\w+`,?)*)")


def test_no_two_rooms_know_of_each_other() -> None:
    found = import_map.arrows()
    assert [name for name in found if name in import_map.reached(found, name)] == []


def test_the_page_shows_the_imports() -> None:
    text = PAGE.read_text()
    new = BETWEEN.sub(lambda m: f"{m[1]}{import_map.drawn()}\n{m[2]}", text)
    if os.environ.get("WEIGHTPLANE_UPDATE_GOLDEN"):
        PAGE.write_text(new)
    assert PAGE.read_text() == new, "run it with WEIGHTPLANE_UPDATE_GOLDEN=1"


@pytest.mark.parametrize("place", sorted(set(PLACE.findall(PAGE.read_text()))), ids=lambda p: p[0])
def test_what_the_page_names_is_there(place: tuple[str, str]) -> None:
    path, names = ROOT / place[0], re.findall(r"\w+", place[1])
    assert path.exists()
    missing = [name for name in names if not re.search(rf"(def|class) {name}\b", path.read_text())]
    assert missing == []


def test_no_module_of_tests_takes_from_another_what_both_need() -> None:
    """That lies in tests/support, or beside them: else one module's change breaks tests of another."""
    taken = re.compile(
        r"^ *(?:from tests\.[\w.]*\btest_\w+ import|from tests\.\w+ import test_\w+|import tests\.[\w.]*\btest_)", re.M
    )
    files = list((ROOT / "tests").rglob("*.py"))
    assert [str(f.relative_to(ROOT)) for f in files if taken.search(f.read_text())] == []
    assert taken.search("from tests.unit.test_plan import made"), "it would be seen"
