"""A version that is installed while the engine has no KV cache: held, and served only when its canary spoke."""

from __future__ import annotations

import pytest

from controlplane.core import engine_core as core
from controlplane.core import engine_effects as fx
from controlplane.core import engine_events as events
from controlplane.core import errors as e
from controlplane.core.engine_sleep import owes_canary
from controlplane.core.engine_state import Held, Hold, HoldKind, Poisoned, Timings, Unset
from tests.support.engine_core import Agent, asleep, version

ME = "trainer:t"
UNPROVEN = Hold(HoldKind.UNPROVEN, "u2")


def unproven(level: int = core.DROPS_WEIGHTS) -> Agent:
    """Version 2 came while it slept, after 1; the fleet serves it."""
    agent = asleep(level, owner=ME)
    wake(agent, kv=False)
    begin(agent, 2)
    agent.handle(events.CanaryDeferred(Timings()))
    agent.welcome(1, version(2))
    return agent


def begin(agent: Agent, number: int) -> None:
    """Up to the first byte installed."""
    agent.receive(number)
    agent.commit(number)
    agent.handle(events.Quiesced())


def wake(agent: Agent, *, kv: bool) -> None:
    agent.handle(events.WakeRequested(ME, kv))
    agent.handle(events.Woke(kv))


def test_inv1_it_is_claimed_when_it_is_whole_and_shut_until_its_canary_spoke() -> None:
    agent = unproven()
    assert (agent.applied, agent.core.gate_open) == (version(2), False)
    assert not owes_canary(agent.core.state), "it cannot speak yet"
    wake(agent, kv=True)
    assert agent.core.state.holds == {UNPROVEN}
    assert owes_canary(agent.core.state)
    assert not agent.core.gate_open
    agent.handle(events.Proven())
    assert (agent.applied, agent.core.gate_open) == (version(2), True)


def test_inv4_a_canary_that_finds_fault_at_last_is_poison() -> None:
    agent = unproven()
    wake(agent, kv=True)
    agent.handle(events.Disproven("a logprob is not finite"))
    assert agent.core.state.weights == Poisoned("a logprob is not finite")
    assert agent.core.state.held_by(HoldKind.UNPROVEN) is None
    agent.apply(3)
    agent.welcome(1, version(3))
    assert agent.core.gate_open, "the next full update heals it"


def test_nobodys_word_but_the_canarys_ends_it() -> None:
    agent = unproven()
    with pytest.raises(e.DevicesTaken):
        agent.handle(events.WakeRequested("ann", kv=True))
    agent.handle(events.HoldChanged(Hold(HoldKind.OPERATOR, "u2"), present=False))
    agent.handle(events.SleepRequested(ME, 1))
    assert UNPROVEN in agent.core.state.holds, "sleep keeps what is owed"
    wake(agent, kv=True)
    assert owes_canary(agent.core.state)


@pytest.mark.parametrize("ends", [events.SleepRequested(ME, core.DROPS_WEIGHTS), events.Died("killed")])
def test_the_hold_goes_with_the_weights_that_it_is_about(ends: events.Event) -> None:
    agent = unproven()
    agent.handle(ends)
    assert agent.core.state.weights == Unset()
    assert agent.core.state.held_by(HoldKind.UNPROVEN) is None


def test_inv4_an_install_that_touched_nothing_gives_it_back_as_unproven_as_it_was() -> None:
    agent = unproven()
    held = agent.core.state.weights
    begin(agent, 3)
    assert agent.core.state.weights == Unset()
    agent.handle(events.InstallEnded(e.InstallFailed("e0", "3", False, "no byte could be read"), touched=False))
    assert agent.core.state.weights == held
    assert isinstance(held, Held)
    assert UNPROVEN in agent.core.state.holds


def test_a_later_version_is_unproven_in_its_place_or_proven_where_it_can_speak() -> None:
    agent = unproven()
    begin(agent, 3)
    agent.handle(events.CanaryDeferred(Timings()))
    assert [h.owner for h in agent.core.state.holds if h.kind is HoldKind.UNPROVEN] == ["u3"]
    wake(agent, kv=True)
    agent.apply(4)
    assert agent.core.state.holds == frozenset()


def test_inv6_the_same_update_again_is_done_also_while_its_canary_is_to_come() -> None:
    agent = unproven()
    accept = next(x for x in agent.open(2, stream=9) if isinstance(x, fx.Accept))
    assert accept.attached
