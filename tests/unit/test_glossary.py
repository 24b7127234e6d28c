"""docs/glossary.md has the names of the contract, and the pages use its words."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from controlplane.core.engine_state import HoldKind
from controlplane.core.errors import WeightplaneError
from controlplane.core.plan import Transport
from engine_agent.receivers import TRANSPORTS
from tests.support.documents import PAGES, REPOSITORY, page_name
from weightplane.v1 import engine_pb2, fleet_pb2, weight_update_pb2

TEXT = (REPOSITORY / "docs" / "glossary.md").read_text()
WORDS = [word for row in re.findall(r"^\| \*\*(.+?)\*\* \|", TEXT, re.MULTILINE) for word in row.split(", ")]
REPLACED = {
    "epoch": "term: epoch is a pass over data",
    "fencing token": "term",
    "replica": "engine",
    "off-policyness": "lag",
    "head node": "coordinator",
}
"""Words for what has another name here; only the glossary, and pages about other projects, may say them."""
ABOUT_OTHERS = {"docs/glossary.md", "docs/comparison.md", "docs/interoperability.md"}


def row(word: str) -> str:
    found = [line for line in TEXT.splitlines() if line.startswith(f"| **{word}")]
    assert found, word
    return found[0]


def names_of(enum: Any) -> list[str]:
    """The names of a proto's enum."""
    return [value.name for value in enum.DESCRIPTOR.values]


def test_no_word_is_explained_twice() -> None:
    assert len(WORDS) == len(set(WORDS))


def test_every_kind_of_hold_is_named() -> None:
    names = re.findall(r"\w+", row("hold").partition("owner: ")[2])
    assert {kind.name.lower() for kind in HoldKind} == set(names)
    assert {name.removeprefix("HOLD_KIND_") for name in names_of(engine_pb2.HoldKind)} - {"UNSPECIFIED"} == {
        name.upper() for name in names
    }


def test_every_transport_is_named() -> None:
    named = set(re.findall(r"`(\w+)`", row("transport")))
    assert named >= set(TRANSPORTS) | {transport.value for transport in Transport}
    assert {f"TRANSPORT_{name.upper()}" for name in named} <= set(names_of(weight_update_pb2.Transport))


def test_the_phases_of_an_update_are_words_of_the_glossary() -> None:
    phases = {name.removeprefix("UPDATE_PHASE_") for name in names_of(fleet_pb2.UpdatePhase)}
    assert set(re.findall(r"\b[A-Z]{6,}\b", row("fleet commit"))) <= phases
    assert "go" in WORDS


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_a_page_says_each_thing_by_its_one_name(page: Path) -> None:
    if page_name(page) in ABOUT_OTHERS:
        return
    prose = re.sub(r"```.*?```|`[^`\n]*`|\([^)\s]*\)", "", page.read_text(), flags=re.DOTALL).lower()
    said = {word: REPLACED[word] for word in REPLACED if re.search(rf"\b{word}s?\b", prose)}
    assert not said


def _subclasses(cls: type[WeightplaneError]) -> Iterable[type[WeightplaneError]]:
    for child in cls.__subclasses__():
        yield child
        yield from _subclasses(child)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_reasons_that_a_page_names_are_reasons(page: Path) -> None:
    """Names in capitals with an underscore, outside code, unless they are of the protos, the environment or others."""
    reasons = {error.reason for error in _subclasses(WeightplaneError)}
    prose = re.sub(r"```.*?```|`[^`\n]*`|\[[^\]]*\]\([^)]*\)", "", page.read_text(), flags=re.DOTALL)
    named = set(re.findall(r"(?<![\w/])[A-Z]+(?:_[A-Z]+)+(?!\w)", prose))
    assert named - reasons <= GRPC_CODES | OTHERS, page_name(page)


GRPC_CODES = {"DEADLINE_EXCEEDED", "NOT_FOUND", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION"}
OTHERS = {"NOT_SERVING", "SO_REUSEPORT", "STRICT_PACK"}
