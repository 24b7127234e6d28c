"""The rooms of the three packages and who knows of whom, drawn from the imports for docs/architecture.md.

A room is a folder directly in a package; the modules beside the folders are the package's own. Of arrows only those
are drawn that do not follow from others.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("controlplane", "engine_agent", "trainer_agent")
Arrows = dict[str, set[str]]


def room(module: str) -> str:
    """`controlplane.core.plan` → `controlplane.core`; `controlplane.config` → `controlplane`."""
    package, *rest = module.split(".")
    return f"{package}.{rest[0]}" if rest and (ROOT / package / rest[0]).is_dir() else package


@cache
def arrows() -> Arrows:
    """By room: the rooms that its modules import from."""
    graph = grimp.build_graph(*PACKAGES)
    found: Arrows = {}
    for module in graph.modules:
        known = {room(m) for m in graph.find_modules_directly_imported_by(module)}
        found.setdefault(room(module), set()).update(known - {room(module)})
    return found


def reached(found: Arrows, start: str) -> set[str]:
    """Every room that `start` knows of, through others too."""
    seen: set[str] = set()
    waiting = list(found[start])
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += found[name]
    return seen


def reduced(found: Arrows) -> Arrows:
    """Without the arrows that follow from others. `found` has no circle."""
    return {a: {b for b in bs if not any(b in reached(found, c) for c in bs)} for a, bs in found.items()}


def drawn() -> str:
    """A mermaid flowchart, one subgraph a package."""
    found = reduced(arrows())
    lines = ["```mermaid", "flowchart TD"]
    for package in PACKAGES:
        rooms = sorted(r for r in found if r.split(".")[0] == package)
        lines += [f"    subgraph {package}_[{package}]", *(f"        {r}[{_short(r)}]" for r in rooms), "    end"]
    lines += [f"    {a} --> {b}" for a in sorted(found) for b in sorted(found[a])]
    return "\n".join([*lines, "```"])


def _short(name: str) -> str:
    return name.split(".")[1] if "." in name else "(its own modules)"
