"""Logs are events with constant names: what a line is about stands in its fields, so that lines can be counted."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("controlplane", "engine_agent", "trainer_agent")
LEVELS = frozenset({"debug", "info", "warning", "error", "exception", "critical"})
NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


def log_calls() -> Iterator[tuple[str, ast.Call]]:
    """Each `log.LEVEL(…)` of the product, with its place."""
    for package in PRODUCT:
        for file in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call) and _logs(node.func):
                    yield f"{file.relative_to(ROOT)}:{node.lineno}", node


def _logs(called: ast.expr) -> bool:
    whose = called.value if isinstance(called, ast.Attribute) and called.attr in LEVELS else None
    return isinstance(whose, ast.Name) and whose.id == "log"


def test_every_events_name_is_a_constant_in_snake_case() -> None:
    calls, wrong = list(log_calls()), []
    for place, call in calls:
        first = call.args[0] if call.args else None
        name = first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""
        if NAME.fullmatch(name) is None or len(call.args) > 1:
            wrong.append(place)
    assert wrong == []
    assert len(calls) > 50, "there are events to look at"
