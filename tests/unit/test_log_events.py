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


def test_an_update_is_named_by_one_key_in_every_log() -> None:
    """`update_id`: what belongs to an update is found by it, whoever wrote it."""
    others = re.compile(r"update|(catch_up|carry|push)_id")
    calls = list(log_calls())
    assert [place for place, call in calls for k in call.keywords if k.arg and others.fullmatch(k.arg)] == []
    bound = [(p, k.arg) for p, call in _calls("bind_contextvars", "bound_contextvars") for k in call.keywords if k.arg]
    assert {key for _, key in bound} == {"component"}, "updates are bound by tracing.log_fields, which has both keys"


def _calls(*names: str) -> Iterator[tuple[str, ast.Call]]:
    for package in PRODUCT:
        for file in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in names:
                    yield f"{file.relative_to(ROOT)}:{node.lineno}", node
