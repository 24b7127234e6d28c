"""docs/exit-codes.md, from the codes themselves: their names, numbers, and what stands below each in the source."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator

from controlplane import exit_codes
from controlplane.exit_codes import ExitCode

HEAD = """# Exit codes

Of every command and every daemon. Numbers from 64 up are Weightplane's own; those of shells begin at 126.

Commands that look or act end with 0 only if what was asked is so: `weightplane verify` with 1 if one engine differs,
`plan` if the update would be refused, `health` if the daemon does not serve, `doctor` if something is wrong.

| code | name | meaning |
|---|---|---|
"""
TAIL = """
A supervisor must never restart 66: a fenced trainer that is started again would be fenced again, or fence its
successor. The units in `deploy/systemd` say so (`RestartPreventExitStatus=`), and the
trainer's command in `deploy/kubernetes` stays down by itself.

This page is made from `controlplane/exit_codes.py`
(`WEIGHTPLANE_UPDATE_GOLDEN=1 pytest tests/unit/test_exit_codes.py`).
"""


def rendered() -> str:
    rows = "".join(f"| {int(ExitCode[name])} | `{name}` | {text} |\n" for name, text in documented())
    return HEAD + rows + TAIL


def documented() -> Iterator[tuple[str, str]]:
    """Each name with the text below it."""
    tree = ast.parse(inspect.getsource(exit_codes))
    (enum,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    for before, after in zip(enum.body, enum.body[1:], strict=False):
        if isinstance(before, ast.Assign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            (target,) = before.targets
            assert isinstance(target, ast.Name)
            yield target.id, " ".join(str(after.value.value).split())
