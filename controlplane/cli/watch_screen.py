"""One screen of a live fleet: as much as fits, those first that do not serve. Pure."""

from __future__ import annotations

from collections import Counter
from datetime import datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from controlplane.cli.fleet_table import (
    STYLES,
    engines_table,
    head,
    state_word,
    trainers_table,
)
from controlplane.cli.tables import add_row, new_table
from controlplane.cli.updates_table import render_updates
from weightplane.v1 import operator_pb2

UPDATES_SHOWN = 5
EVENTS_SHOWN = 8
OTHER_LINES = 12
"""Heads, and empty lines between."""
FEWEST_ENGINES = 4


def render_watch(view: operator_pb2.FleetView, now: float, height: int, gone: str = "") -> RenderableType:
    """`height`: lines of the terminal. `gone`: the coordinator went away, and this is what it said last."""
    causes = sum(bool(update.cause) for update in view.updates[:UPDATES_SHOWN])
    others = OTHER_LINES + UPDATES_SHOWN + causes + EVENTS_SHOWN + len(view.trainers)
    room = max(FEWEST_ENGINES, height - others)
    parts: list[RenderableType] = [Text(f"{gone}; this is what it said last", style="bold red")] if gone else []
    parts += [*head(view), Text(), *_engines(view, now, room), Text()]
    parts += [trainers_table(view.trainers, now), Text()] if view.trainers else []
    parts += [render_updates(view, UPDATES_SHOWN, now), Text(), _events(view)]
    return Group(*parts)


def _engines(view: operator_pb2.FleetView, now: float, room: int) -> list[RenderableType]:
    """Those that serve, last; what does not fit is counted."""
    engines = sorted(view.engines, key=lambda e: state_word(e) == "serving")
    shown, rest = engines[:room], engines[room:]
    few = operator_pb2.FleetView(state=view.state, engines=shown)
    if not rest:
        return [engines_table(few, now)]
    words = Counter(map(state_word, rest))
    more = Text("and ")
    for i, (word, number) in enumerate(words.most_common()):
        more.append(f"{', ' if i else ''}{number} {word}", style=STYLES.get(word, ""))
    return [engines_table(few, now), more]


def _events(view: operator_pb2.FleetView) -> Table:
    table = new_table("TIME", "EVENT", "WHO", "WHAT")
    for event in view.events[:EVENTS_SHOWN]:
        style = "bold red" if event.alarming else ""
        add_row(table, _clock(event), event.name, event.subject, Text(event.text, style=style))
    return table


def fresh(before: operator_pb2.FleetView | None, after: operator_pb2.FleetView) -> list[operator_pb2.FleetEvent]:
    """What happened since, oldest first. At first: all that is still remembered."""
    if before is None or before.coordinator_term != after.coordinator_term:
        return list(reversed(after.events))
    newest = list(before.events[:1])
    count = next((i for i, event in enumerate(after.events) if newest and event == newest[0]), len(after.events))
    return list(reversed(after.events[:count]))


def event_line(event: operator_pb2.FleetEvent) -> str:
    """One line for a log."""
    mark = "!" if event.alarming else " "
    return f"{event.time.ToJsonString()} {mark} {event.name} {event.subject}: {event.text}"


def _clock(event: operator_pb2.FleetEvent) -> str:
    return datetime.fromtimestamp(event.time.ToMilliseconds() / 1000).strftime("%H:%M:%S")
