"""The table of moves: the core keeps to it, and docs/protocol.md shows it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from controlplane.core import engine_events as events
from controlplane.core import engine_transitions as table
from controlplane.core.engine_state import EngineState, Held, Life
from controlplane.core.errors import PeerLost
from controlplane.core.update_transaction import PHASE_MOVES, Phase
from controlplane.core.versions import EngineId, Incarnation, ModelName, RunId, Term, WeightVersion
from tests.support.engine_core import Agent

PROTOCOL = Path(__file__).resolve().parents[2] / "docs" / "protocol.md"
NEW = EngineState(RunId("run"), ModelName("policy"), EngineId("e0"), Incarnation("i"))
V1 = WeightVersion(1, Term(1))


def test_a_move_without_a_row_is_no_state_of_ours() -> None:
    with pytest.raises(AssertionError, match=r"starting → dead by Started"):
        table.check(events.Started, NEW, replace(NEW, life=Life.DEAD))


def test_inv2_held_weights_never_become_others_in_one_step() -> None:
    held = replace(NEW, weights=Held(V1, b"d"))
    other = replace(NEW, weights=Held(WeightVersion(2, Term(1)), b"d"))
    with pytest.raises(AssertionError):
        table.check(events.HoldChanged, held, other)
    table.check(events.HoldChanged, held, replace(held, holds=frozenset()))


def test_the_core_keeps_to_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent()
    agent.receive(1)
    agent.commit(1)
    monkeypatch.setattr(table, "TABLE", frozenset())
    with pytest.raises(AssertionError):
        agent.handle(events.InstallEnded(PeerLost("x", "y"), touched=True))


@pytest.mark.parametrize("part", list(table.Part), ids=lambda p: p.value)
def test_every_value_of_a_part_is_in_the_table_and_can_be_left_or_is_an_end(part: table.Part) -> None:
    rows = [m for m in table.TABLE if m.part is part]
    values = set(type(rows[0].before))
    seen = {m.before for m in rows} | {m.after for m in rows}
    assert seen == values
    stuck = values - {m.before for m in rows}
    assert stuck <= {Life.DEAD}


def test_phases_end_where_they_say() -> None:
    assert {after for _, after in PHASE_MOVES} | {Phase.PREPARING} == set(Phase)
    assert all(not before.final for before, _ in PHASE_MOVES)


def drawn() -> str:
    parts = [
        f"The engine's {part.value}, with the events that move it:\n\n```mermaid\n{table.diagram(part)}\n```"
        for part in table.Part
    ]
    phases = "\n".join(sorted(f"    {a.value} --> {b.value}" for a, b in PHASE_MOVES))
    parts.append(f"The phases of an update:\n\n```mermaid\nstateDiagram-v2\n{phases}\n```")
    return "\n\n".join(parts)


def test_the_diagrams_of_the_protocol_are_drawn_from_the_table() -> None:
    begin, end = "<!-- drawn from controlplane/core/engine_transitions.py -->\n", "<!-- end of drawing -->"
    text = PROTOCOL.read_text()
    before, rest = text.split(begin)
    old, after = rest.split(end)
    if os.environ.get("WEIGHTPLANE_UPDATE_GOLDEN"):
        PROTOCOL.write_text(f"{before}{begin}\n{drawn()}\n\n{end}{after}")
        old = f"\n{drawn()}\n\n"
    assert old.strip() == drawn(), "WEIGHTPLANE_UPDATE_GOLDEN=1 draws them anew"
