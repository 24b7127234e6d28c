"""What `weightplane status` shows of a fleet."""

from __future__ import annotations

from rich.console import Console

from controlplane.cli.fleet_table import render_fleet
from controlplane.core.errors import LedgerRegressed
from tests.support.golden import assert_golden
from tests.support.shown_fleet import NOW, engine, version, whole_fleet
from weightplane.v1 import fleet_pb2, operator_pb2


def shown(view: operator_pb2.FleetView) -> str:
    console = Console(width=150, no_color=True, force_terminal=False, soft_wrap=True)
    with console.capture() as capture:
        console.print(render_fleet(view, NOW))
    return capture.get()


def test_a_whole_fleet_reads_as_reviewed() -> None:
    assert_golden("status.txt", shown(whole_fleet()))


def test_an_empty_fleet_reads_as_reviewed() -> None:
    assert_golden("status-empty.txt", shown(operator_pb2.FleetView(run_id="run-a", coordinator_term=1)))


def test_a_regressed_ledger_and_engines_that_catch_up_are_a_line_each() -> None:
    view = whole_fleet()
    view.recovering = True
    view.ledger_regressed = str(LedgerRegressed(what="number", known=8, seen=12, who="engine-3"))
    for name in ("engine-2", "engine-4"):
        behind = next(e for e in view.engines if e.status.engine.engine_id == name)
        behind.catch_up = f"catch-up-3-{name[-1]}"
        behind.desired.CopyFrom(version(2, 7))
    view.updates[0].restores.CopyFrom(version(1, 3))
    assert_golden("status-regressed.txt", shown(view))


def test_a_frozen_model_says_so() -> None:
    models = [fleet_pb2.ModelState(model="teacher", served=[version(0, 0)], frozen=True)]
    view = operator_pb2.FleetView(run_id="run-a", state=fleet_pb2.FleetState(models=models))
    assert "teacher is frozen as loaded" in shown(view)


def test_a_recovering_coordinator_says_so() -> None:
    view = operator_pb2.FleetView(run_id="run-a", coordinator_term=2, recovering=True)
    assert "RECOVERING" in shown(view)


def test_inv_8_the_last_words_of_a_lost_engine_are_shown_in_no_column() -> None:
    lost = next(line for line in shown(whole_fleet()).splitlines() if line.startswith("engine-3"))
    assert lost.split()[:5] == ["engine-3", "UNKNOWN", "UNKNOWN", "2.7", "UNKNOWN"]
    assert "serving" not in lost
    assert "open" not in lost


def test_a_name_that_looks_like_markup_is_shown_as_it_is() -> None:
    view = operator_pb2.FleetView(run_id="[red]run[/red]", engines=[engine("[b]e[/b]-0", "serving")])
    assert "[red]run[/red]" in shown(view)
    assert "[b]e[/b]-0" in shown(view)
