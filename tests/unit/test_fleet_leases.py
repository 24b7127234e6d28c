"""Leases and terms: who may write, when another may take over, and what becomes of a zombie."""

from __future__ import annotations

import pytest

from controlplane.core import errors as e
from controlplane.core import fleet_effects as fx
from controlplane.core import fleet_events as events
from controlplane.core.engine_state import Stage
from controlplane.core.update_transaction import Phase
from controlplane.core.versions import Term
from tests.support.fleet_core import POLICY, TTL, Fleet, two_engines


def test_p5_a_lease_is_held_until_its_time_ends() -> None:
    f, _ = two_engines()
    with pytest.raises(e.LeaseHeld) as refusal:
        f.trainer("t2", name="other")
    assert (refusal.value.holder, refusal.value.term) == ("trainer", 1)
    f.now += TTL
    f.trainer("t2", name="other")
    assert f.core.model(POLICY).term == 2


def test_takeover_and_proof_of_death_need_not_wait() -> None:
    f, _ = two_engines()
    f.trainer("t2", ended="t1")
    assert f.core.model(POLICY).term == 2
    f.trainer("t3", name="other", takeover=True)
    assert f.core.model(POLICY).term == 3


def test_expiry_alone_fences_nobody() -> None:
    f, engines = two_engines()
    f.now += 100 * TTL
    for name, session in engines.items():
        f.report(session, name)
    assert f.begin("u1").version.term == 1


def test_a_lease_is_not_renewed_by_life_without_progress() -> None:
    f, _ = two_engines()
    session = f.sessions
    for _ in range(15):
        f.now += 6.0
        f.handle(events.TrainerReported(session, Term(1), 0, "train", 1))
    assert f.now > 60.0 + TTL
    f.trainer("t2", name="other")
    assert f.core.model(POLICY).term == 2


def test_a_lease_is_not_renewed_by_new_connections_without_progress() -> None:
    f, _ = two_engines()
    while f.now < 60.0 + 2 * TTL:
        f.handle(events.SessionEnded(f.sessions, goodbye=False))
        f.now += 6.0
        f.trainer("t1", held=1)
    f.trainer("t2", name="other")
    assert f.core.model(POLICY).term == 2


def test_a_trainer_that_moved_while_it_was_away_has_its_lease_again_with_its_first_word() -> None:
    f, _ = two_engines()
    f.handle(events.SessionEnded(f.sessions, goodbye=False))
    f.now += 100.0
    f.handle(events.TrainerReported(f.trainer("t1", held=1), Term(1), 2, "train", 7))
    with pytest.raises(e.LeaseHeld):
        f.trainer("t2", name="other")


def test_the_coordinators_own_pause_or_restart_counts_against_no_trainer() -> None:
    f, _ = two_engines()
    f.now += 100.0
    f.handle(events.Paused(100.0))
    f.handle(events.SessionEnded(f.sessions, goodbye=False))
    again = Fleet(f.ledger)
    for one in (f, again):
        one.trainer("t1", held=1)
        one.now += TTL - 1.0
        with pytest.raises(e.LeaseHeld):
            one.trainer("t2", name="other")


def test_inv7_a_fenced_trainer_cannot_begin_and_its_session_is_told() -> None:
    f, _ = two_engines()
    zombie = f.sessions
    update = f.begin("u1")
    f.trainer("t2", name="other", takeover=True)
    assert update.phase is Phase.FAILED
    closed = [x for x in f.effects if isinstance(x, fx.CloseSession) and x.session == zombie]
    assert isinstance(closed[0].error, e.StaleTerm)
    with pytest.raises(e.StaleTerm):
        f.begin("u2", term=1)
    with pytest.raises(e.StaleTerm):
        f.trainer("t1", held=1)


def test_inv7_a_fenced_trainers_late_word_moves_nothing_of_its_successors() -> None:
    f, _ = two_engines()
    zombie = f.sessions
    f.trainer("t2", name="other", takeover=True)
    assert f.handle(events.TrainerReported(zombie, Term(1), 9, "train", 9, holds_devices=True)) == []
    holder = f.core.trainers[POLICY]
    assert (holder.step, holder.progress, holder.holds_devices) == (None, 0, False)


def test_inv7_go_outlives_a_takeover() -> None:
    f, engines = two_engines()
    update = f.begin("u1")
    f.stage_all(engines, update, Stage.READY)
    f.trainer("t2", name="other", takeover=True)
    assert update.phase is Phase.GO
    f.stage_all(engines, update, Stage.APPLIED)
    assert f.served == (update.version,)


def test_a_broken_session_is_resumed_under_the_same_term() -> None:
    f, _ = two_engines()
    f.handle(events.SessionEnded(f.sessions, goodbye=False))
    f.now += 100.0
    f.trainer("t1", held=1)
    assert f.core.model(POLICY).term == 1
