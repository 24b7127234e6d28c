"""A view keeps the messages of what did not change since the one before: it must say just what one made afresh says."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace

import pytest

from controlplane.coordinator import views
from controlplane.core import fleet_events as events
from controlplane.core.engine_state import Hold, HoldKind, Poisoned, Refusal
from controlplane.core.errors import WeightplaneError
from controlplane.core.versions import EngineId, Term, WeightVersion
from tests.support.fleet_core import POLICY, RUN, Fleet

SHIFT = 1000.0


def step(f: Fleet, engines: dict[str, int], chance: random.Random, number: int) -> None:
    """Something that may show in a view."""
    name = chance.choice(sorted(engines))
    session = engines[name]
    match chance.randrange(9):
        case 0:
            f.push(f"u{number}", engines)
        case 1:
            hold = Hold(HoldKind.OPERATOR, "anna")
            f.report(session, name, holds=f.states[name].holds ^ {hold})
        case 2:
            f.report(session, name, weights=Poisoned(f"cause {number}"))
        case 3:
            f.report(session, name, live_requests=number)
        case 4:
            refused = Refusal(WeightVersion(number, Term(1)), "REASON", "text", f.now)
            f.handle(events.EngineReported(session, f.states[name], False, refused))
        case 5:
            f.handle(events.SessionEnded(session, goodbye=False))
            engines[name] = f.engine(name, incarnation=f"i{number}")
        case 6 if f.states[name].applied is not None:
            applied = f.states[name].applied
            assert applied is not None
            f.handle(events.KeepRequested(RUN, EngineId(name), POLICY, applied.number))
        case 7:
            f.handle(events.ReleaseRequested(RUN, EngineId(name))) if EngineId(name) in f.core.kept else None
        case _:
            f.report(session, name)  # a heartbeat


@pytest.mark.parametrize("seed", range(20))
def test_a_view_that_keeps_messages_says_what_one_made_afresh_says(seed: int) -> None:
    chance, f = random.Random(seed), Fleet()
    engines = {name: f.engine(name) for name in ("e0", "e1", "e2")}
    f.trainer()
    kept = views.Messages()
    for number in range(30):
        with suppress(WeightplaneError):  # a push to nobody, a version of which there is no checkpoint
            step(f, engines, chance, number)
        f.now += 0.25
        mine = views.fleet_view(f.core, f.now, SHIFT, kept)
        assert mine == views.fleet_view(f.core, f.now, SHIFT, views.Messages())


def test_a_condition_keeps_its_date_and_takes_another_reason() -> None:
    f = Fleet()
    session = f.engine("e0")
    messages = views.Messages()

    def gate() -> tuple[str, int]:
        view = views.fleet_view(f.core, f.now, 0.0, messages)
        found = next(c for c in view.engines[0].conditions if c.type == "GateOpen")
        return found.reason, found.last_transition_time.seconds

    assert gate() == ("Unset", 0)
    f.now = 5.0
    f.report(session, "e0", holds=frozenset({Hold(HoldKind.OPERATOR, "anna")}))
    assert gate() == ("Held", 0)
    f.states["e0"] = replace(f.states["e0"], holds=frozenset())
    f.trainer()
    f.now = 7.0
    f.push("u1", {"e0": session})
    assert gate() == ("Open", 7)


def test_an_engine_that_left_is_in_no_view_and_kept_by_none() -> None:
    f = Fleet()
    session = f.engine("e0")
    messages = views.Messages()
    assert len(views.fleet_view(f.core, 0.0, 0.0, messages).engines) == 1
    f.handle(events.SessionEnded(session, goodbye=True))
    assert not views.fleet_view(f.core, 0.0, 0.0, messages).engines
    f.engine("e0", incarnation="i2")
    view = views.fleet_view(f.core, 0.0, 0.0, messages)
    assert [e.status.engine.incarnation for e in view.engines] == ["i2"]
