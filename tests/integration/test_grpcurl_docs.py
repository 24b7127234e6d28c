"""docs/grpcurl.md, executed: its commands with a real grpcurl, against a real coordinator and a real engine agent.

Commands run in the page's order. A ```text block after a command is its answer; a ```json block names keys that the
answer (one JSON object after another) has, each in some object of it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.eventually import eventually
from tests.support.local_fleet import RUN, LocalFleet, local_fleet
from tests.support.writer import LAYOUT, Weights

PAGE = Path(__file__).resolve().parents[2] / "docs" / "grpcurl.md"
BIN = Path(sys.executable).parent
COMMAND_SECONDS = 60


@dataclass(frozen=True)
class Block:
    """A fenced block of the page."""

    kind: str
    text: str


def blocks() -> list[Block]:
    return [Block(m[1], m[2]) for m in re.finditer(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(), re.M | re.S)]


def commands() -> Iterator[tuple[str, Block | None]]:
    """Each command with the answer that the page shows for it."""
    found = blocks()
    for block, after in zip(found, [*found[1:], None], strict=True):
        if block.kind == "sh" and not block.text.startswith("export "):
            yield block.text, after if after is not None and after.kind != "sh" else None


@pytest.fixture
async def environment(tmp_path: Path) -> AsyncIterator[dict[str, str]]:
    """The variables that the page exports, for a fleet that serves a version. What `rollback` then does to engines is
    no matter of this page: these read no checkpoints, and keep what they have."""
    async with local_fleet(tmp_path) as fleet:
        weights = Weights()
        state = await fleet.push(weights)
        await eventually(lambda: _routable(fleet))
        engine = (await fleet.view()).engines[0]
        names = {
            "COORDINATOR": fleet.address,
            "ENGINE": engine.endpoint,
            "RUN": RUN,
            "ENGINE_ID": engine.status.engine.engine_id,
            "INCARNATION": engine.status.engine.incarnation,
            "TRAINER_TERM": str(fleet.term),
            "NUMBER": str(state.version.number),
            "CHECKPOINT": "policy-1",
            "LAYOUT_DIGEST": base64.b64encode(LAYOUT.digest).decode(),
            "CONTENT_DIGEST": base64.b64encode(weights.digest).decode(),
        }
        exported = {
            name for b in blocks() if b.kind == "sh" for name in re.findall(r"(\w+)=\S", b.text) if name.isupper()
        }
        assert exported == names.keys(), "the page exports what this test sets"
        yield os.environ | names | {"PATH": f"{BIN}:{os.environ['PATH']}"}


async def _routable(fleet: LocalFleet) -> bool:
    return all(e.routable for e in (await fleet.view()).engines)


async def run(command: str, environment: dict[str, str]) -> str:
    """Its output, standard error included: grpcurl writes errors there."""
    process = await asyncio.create_subprocess_exec(
        "bash",
        *("-euo", "pipefail", "-c", command),
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), COMMAND_SECONDS)
    assert process.returncode == 0, f"{command}\nended with {process.returncode}:\n{output.decode()}"
    return output.decode()


async def test_every_command_of_the_page_works_and_answers_as_shown(environment: dict[str, str]) -> None:
    count = 0
    for command, shown in commands():
        answer = await run(command, environment)
        count += 1
        if shown is not None:
            _check(command, shown, answer)
    assert count == sum("grpcurl -plaintext" in block.text for block in blocks())


async def test_describing_the_data_contract_reads_as_documentation(environment: dict[str, str]) -> None:
    text = await run("grpcurl -plaintext $ENGINE describe weightplane.v1.WeightUpdate", environment)
    assert "// Bring one version to this engine." in text
    assert "Errors, by ErrorInfo.reason:" in text


def _check(command: str, shown: Block, answer: str) -> None:
    if shown.kind == "text":
        assert _without_numbers(answer) == _without_numbers(shown.text), command
        return
    answers = list(_objects(answer))
    missing = [key for key in _keys(json.loads(shown.text)) if not any(key in _keys(a) for a in answers)]
    assert not missing, f"{command}\nhas no {missing} in:\n{answer}"


def _without_numbers(text: str) -> str:
    """Versions differ from run to run, and an engine's name is the test's."""
    return re.sub(r"\d+", "N", text.replace("engine-0", "e0")).strip()


def _objects(text: str) -> Iterator[Any]:
    """JSON objects, one after the other, as a stream's messages are printed."""
    decoder, rest = json.JSONDecoder(), text.lstrip()
    while rest:
        value, end = decoder.raw_decode(rest)
        yield value
        rest = rest[end:].lstrip()


def _keys(value: Any, path: str = "") -> set[str]:
    """Paths of everything in `value`; words are part of their path, elements of a list stand in for each other."""
    if isinstance(value, dict):
        return {key for name, inner in value.items() for key in _keys(inner, f"{path}.{name}")}
    if isinstance(value, list):
        return {key for inner in value for key in _keys(inner, f"{path}[]")}
    fixed = isinstance(value, bool) or (isinstance(value, str) and value.isupper())
    return {f"{path}={value}" if fixed else path}
