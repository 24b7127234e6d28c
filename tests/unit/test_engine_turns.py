"""INV-7: a trainer's word over an engine's devices that comes after a later one of it, or of its successors."""

from __future__ import annotations

import pytest

from controlplane.core import engine_events as events
from controlplane.core import errors as e
from controlplane.core.engine_state import HoldKind, Residency
from controlplane.core.versions import DeviceTurn, Term
from tests.support.engine_core import Agent, version

OWNER, SUCCESSOR, PERSON = "trainer:t0", "trainer:t1", "ann"


def turn(term: int, number: int) -> DeviceTurn:
    return DeviceTurn(Term(term), number)


def sleep(term: int, number: int, owner: str = OWNER) -> events.SleepRequested:
    return events.SleepRequested(owner, 1, turn(term, number))


def wake(term: int, number: int, owner: str = OWNER, *, kv: bool = True) -> events.WakeRequested:
    return events.WakeRequested(owner, kv, turn(term, number))


def serving() -> Agent:
    """Under term 1."""
    agent = Agent()
    agent.apply(1)
    agent.welcome(1, version(1))
    return agent


def residency(agent: Agent) -> Residency:
    return agent.core.state.residency


def refuses(agent: Agent, error: type[e.WeightplaneError], event: events.Event) -> None:
    before = agent.core.state
    with pytest.raises(error):
        agent.handle(event)
    assert agent.core.state == before


def test_inv7_a_sleep_of_a_dead_life_is_refused_once_the_next_one_has_its_term() -> None:
    agent = serving()
    agent.welcome(2, version(1))
    refuses(agent, e.StaleTerm, sleep(1, 1))
    assert agent.core.gate_open


def test_inv7_the_next_lifes_own_word_fences_also_before_the_coordinator_says_its_term() -> None:
    agent = serving()
    agent.handle(sleep(1, 1))
    agent.handle(wake(2, 1))
    agent.handle(events.Woke(kv=True))
    refuses(agent, e.StaleTerm, sleep(1, 2))
    assert residency(agent) is Residency.AWAKE


def test_inv7_a_sleep_that_its_own_life_went_past_is_refused() -> None:
    agent = serving()
    agent.handle(wake(1, 2))  # what it gave was awake: the sleep of turn 1 is still on its way
    refuses(agent, e.StaleTurn, sleep(1, 1))


def test_inv7_a_late_wake_brings_no_engine_onto_devices_that_were_taken_again() -> None:
    agent = serving()
    agent.handle(sleep(1, 3))
    refuses(agent, e.StaleTurn, wake(1, 2))
    refuses(agent, e.StaleTurn, wake(1, 2, kv=False))
    agent.welcome(2, version(1))
    agent.handle(sleep(2, 1))
    refuses(agent, e.StaleTerm, wake(1, 4))


def test_the_same_turn_may_be_repeated() -> None:
    agent = serving()
    for _ in range(2):
        agent.handle(sleep(1, 1))
    for _ in range(2):
        agent.handle(wake(1, 2))
    agent.handle(events.Woke(kv=True))
    assert residency(agent) is Residency.AWAKE


def test_who_was_fenced_may_still_give_back_what_it_took() -> None:
    agent = serving()
    agent.handle(sleep(1, 1))
    agent.welcome(2, version(1))
    agent.handle(wake(1, 2))
    agent.handle(events.Woke(kv=True))
    assert residency(agent) is Residency.AWAKE


def test_a_dead_engines_devices_are_given_by_nobody_that_was_fenced() -> None:
    agent = serving()
    agent.handle(sleep(1, 1))
    agent.handle(events.Died("killed"))
    agent.core.heed(sleep(2, 1, SUCCESSOR))
    with pytest.raises(e.StaleTerm):
        agent.core.heed(wake(1, 2))


def test_a_person_has_no_turns_and_may_speak_for_a_trainer_that_is_gone() -> None:
    agent = serving()
    agent.handle(sleep(1, 5))
    agent.handle(events.WakeRequested(OWNER, kv=True))
    agent.handle(events.Woke(kv=True))
    agent.handle(events.SleepRequested(PERSON, 1))
    assert agent.core.state.held_by(HoldKind.ASLEEP) == PERSON
