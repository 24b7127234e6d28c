"""What an engine takes and from whom: asleep, draining, frozen, deltas, and a coordinator as the writer."""

from __future__ import annotations

import pytest

from controlplane.core import engine_core as core
from controlplane.core import engine_effects as fx
from controlplane.core import engine_events as events
from controlplane.core import errors as e
from controlplane.core.engine_state import Held, Hold, HoldKind, Residency, Stage, Timings, Unset
from controlplane.core.layout import content_digest
from controlplane.core.versions import FROZEN, Term
from tests.support.engine_core import Agent, asleep, checksums, version

DRAIN = Hold(HoldKind.DRAINING, "ann")
DIGEST = content_digest(checksums(1))


def starts(effects: list[fx.Effect]) -> list[fx.Effect]:
    return [x for x in effects if isinstance(x, (fx.StartSleep, fx.StartWake))]


# ---- sleep ----


def test_p2_an_update_to_a_sleeping_engine_is_refused_and_harms_nothing() -> None:
    agent = asleep()
    before = agent.core.state
    with pytest.raises(e.EngineAsleep):
        agent.open(2)
    assert agent.core.state == before
    agent.handle(events.WakeRequested("trainer", kv=True))
    agent.handle(events.Woke(kv=True))
    assert agent.core.gate_open
    agent.apply(2)
    assert agent.applied == version(2)


def test_p2_weights_in_memory_take_the_trainers_update_and_nobody_elses() -> None:
    agent = asleep(core.DROPS_WEIGHTS, owner="trainer:t")
    agent.handle(events.WakeRequested("trainer:t", kv=False))
    agent.handle(events.Woke(kv=False))
    assert agent.core.state.residency is Residency.WEIGHTS
    with pytest.raises(e.EngineAsleep, match="KV cache"):
        agent.open(1, by_coordinator=1)
    agent.open(2)


def test_an_update_to_an_engine_that_sleeps_for_a_person_needs_the_kv_cache_too() -> None:
    agent = asleep(owner="ann")
    agent.handle(events.WakeRequested("ann", kv=False))
    agent.handle(events.Woke(kv=False))
    with pytest.raises(e.EngineAsleep, match="KV cache"):
        agent.open(2)
    agent.handle(events.WakeRequested("ann", kv=True))
    agent.handle(events.Woke(kv=True))
    assert agent.core.gate_open


def test_inv1_a_sleep_that_drops_weights_drops_the_claim_before_they_go() -> None:
    agent = asleep(core.DROPS_WEIGHTS)
    assert agent.core.state.weights == Unset()
    agent.handle(events.WakeRequested("trainer", kv=True))
    agent.handle(events.Woke(kv=True))
    assert agent.applied is None
    assert not agent.core.gate_open
    assert asleep(1).applied == version(1)


def test_the_gate_is_shut_from_the_request_until_all_is_resident() -> None:
    agent = asleep()
    assert not agent.core.gate_open
    agent.handle(events.HoldChanged(Hold(HoldKind.ASLEEP, "trainer"), present=False))
    assert not agent.core.gate_open, "a hold's end brings no memory back"


def test_only_who_put_it_to_sleep_wakes_it() -> None:
    agent = asleep()
    with pytest.raises(e.DevicesTaken, match="trainer"):
        agent.handle(events.WakeRequested("ann", kv=True))
    agent.handle(events.SleepRequested("ann", 1))
    assert starts(agent.handle(events.WakeRequested("trainer", kv=True))) == [], "its own hold ends, ann's stays"
    with pytest.raises(e.DevicesTaken, match="ann"):
        agent.handle(events.WakeRequested("trainer", kv=True))
    assert starts(agent.handle(events.WakeRequested("ann", kv=True))) == [fx.StartWake(kv=True)]


def test_sleep_and_wake_are_idempotent() -> None:
    agent = asleep()
    assert starts(agent.handle(events.SleepRequested("trainer", 1))) == []
    assert starts(agent.handle(events.SleepRequested("trainer", 2))) == [fx.StartSleep(2)]
    assert starts(agent.handle(events.WakeRequested("trainer", kv=True))) == [fx.StartWake(kv=True)]
    agent.handle(events.Woke(kv=True))
    assert starts(agent.handle(events.WakeRequested("trainer", kv=True))) == []


def test_a_wake_that_a_later_sleep_overtook_opens_nothing() -> None:
    agent = asleep()
    agent.handle(events.WakeRequested("trainer", kv=True))
    agent.handle(events.SleepRequested("trainer", 1))
    agent.handle(events.Woke(kv=True))
    assert agent.core.state.residency is Residency.ASLEEP
    assert not agent.core.gate_open


def test_an_install_is_never_cut_by_a_sleep() -> None:
    agent = Agent()
    agent.receive(1)
    agent.commit(1)
    before = agent.core.state
    with pytest.raises(e.UpdateInProgress):
        agent.handle(events.SleepRequested("trainer", 1))
    assert agent.core.state == before
    assert starts(agent.handle(events.WakeRequested("trainer", kv=True))) == []


def test_a_sleep_ends_an_update_that_did_not_commit() -> None:
    agent = Agent()
    agent.receive(1)
    effects = agent.handle(events.SleepRequested("trainer", 1))
    ended = [x.error for x in effects if isinstance(x, fx.EndStream)]
    assert [type(x) for x in ended] == [e.EngineAsleep]
    with pytest.raises(e.UpdateAborted):
        agent.commit(1)


def test_what_the_engine_cannot_do_is_refused() -> None:
    agent = Agent()
    agent.core.capabilities = frozenset()
    with pytest.raises(e.UnsupportedByEngine):
        agent.handle(events.SleepRequested("trainer", 1))
    assert agent.core.state.residency is Residency.AWAKE


# ---- draining ----


def test_a_draining_engine_takes_no_update_and_ends_what_did_not_commit() -> None:
    agent = Agent()
    agent.receive(1)
    effects = agent.handle(events.HoldChanged(DRAIN, present=True))
    assert [type(x.error) for x in effects if isinstance(x, fx.EndStream)] == [e.EngineDraining]
    with pytest.raises(e.EngineDraining, match="ann"):
        agent.open(2, stream=2)
    agent.handle(events.HoldChanged(DRAIN, present=False))
    agent.apply(2, stream=3)
    assert agent.applied == version(2)


def test_draining_lets_an_install_end() -> None:
    agent = Agent()
    agent.receive(1)
    agent.commit(1)
    agent.handle(events.HoldChanged(DRAIN, present=True))
    agent.handle(events.Quiesced())
    agent.handle(events.CanaryPassed(Timings()))
    assert agent.applied == version(1)
    assert not agent.core.gate_open


# ---- frozen models ----


def test_inv1_a_frozen_engine_holds_number_0_by_its_own_sum() -> None:
    agent = Agent(frozen=DIGEST)
    assert agent.core.state.weights == Held(FROZEN, DIGEST)
    assert not agent.core.gate_open
    agent.welcome(1, FROZEN)
    assert agent.core.gate_open


def test_a_frozen_engine_takes_no_update_and_keeps_its_weights() -> None:
    agent = Agent(frozen=DIGEST)
    with pytest.raises(e.ModelFrozen):
        agent.open(1)
    with pytest.raises(e.ModelFrozen):
        agent.handle(events.SleepRequested("ann", core.DROPS_WEIGHTS))
    agent.handle(events.SleepRequested("ann", 1))
    assert agent.core.state.weights == Held(FROZEN, DIGEST)


# ---- deltas ----


def test_inv5_a_delta_for_other_weights_is_refused_with_both() -> None:
    agent = Agent()
    agent.apply(1)
    for base in (Held(version(9), DIGEST), Held(version(1), b"o" * 32)):
        with pytest.raises(e.BaseMismatch) as refused:
            agent.open(2, base=base)
        assert refused.value.got.startswith("1.1")
    assert agent.applied == version(1)


def test_inv4_a_poisoned_engine_refuses_deltas() -> None:
    agent = Agent()
    agent.apply(1)
    agent.handle(events.SpansDisagreed("counted wrongly"))
    with pytest.raises(e.EnginePoisoned):
        agent.open(2, base=Held(version(1), DIGEST))


def test_a_delta_with_the_right_base_needs_an_engine_that_can_apply_it() -> None:
    agent = Agent()
    agent.apply(1)
    with pytest.raises(e.UnsupportedByEngine):
        agent.open(2, base=Held(version(1), DIGEST))


# ---- a coordinator as the writer ----


def poisoned(*served: int) -> Agent:
    """It applied 1 and 2 in this life, and holds a mixture now."""
    agent = Agent()
    agent.apply(1)
    agent.apply(2, stream=2)
    agent.welcome(1, *(version(n) for n in served), coordinator_term=3)
    agent.handle(events.SpansDisagreed("counted wrongly"))
    return agent


def test_inv5_while_it_is_unset_a_coordinator_may_bring_any_served_version() -> None:
    agent = poisoned(1)
    agent.open(1, stream=3, by_coordinator=3)
    agent.chunk(1, stream=3)
    agent.handle(events.BytesVerified(3))
    agent.commit(1, stream=3)
    agent.handle(events.Quiesced())
    agent.handle(events.CanaryPassed(Timings()))
    assert agent.core.gate_open
    with pytest.raises(e.StaleVersion):
        agent.open(1, stream=4, update_id="another")
    agent.apply(3, stream=5)
    assert agent.applied == version(3)


@pytest.mark.parametrize("served", [(2,), ()])
def test_inv5_what_is_not_served_is_not_brought_below_what_was_applied(served: tuple[int, ...]) -> None:
    agent = poisoned(*served)
    with pytest.raises(e.StaleVersion):
        agent.open(1, stream=3, by_coordinator=3)


def test_inv5_nobody_goes_back_while_something_is_held() -> None:
    agent = Agent()
    agent.apply(2)
    agent.welcome(1, version(1))
    with pytest.raises(e.StaleVersion):
        agent.open(1, stream=3, by_coordinator=1)


def test_inv7_an_old_coordinator_writes_nothing_and_a_new_one_ends_its_update() -> None:
    agent = poisoned(1)
    with pytest.raises(e.StaleTerm, match="coordinator"):
        agent.open(1, stream=3, by_coordinator=2)
    agent.open(1, stream=4, by_coordinator=3)
    effects = agent.welcome(1, version(1), coordinator_term=4)
    assert [type(x.error) for x in effects if isinstance(x, fx.EndStream)] == [e.StaleTerm]


def test_inv7_a_trainers_term_does_not_fence_a_coordinator() -> None:
    agent = Agent()
    agent.welcome(9, version(1), coordinator_term=1)
    agent.open(1, by_coordinator=1)
    assert agent.core.term == 9
    assert agent.stage is Stage.RECEIVING


def test_a_catch_up_yields_to_a_newer_version_until_it_installs() -> None:
    agent = poisoned(1)
    agent.open(1, stream=3, by_coordinator=3)
    effects = agent.open(4, stream=4)
    assert [type(x.error) for x in effects if isinstance(x, fx.EndStream)] == [e.UpdateAborted]
    other = poisoned(1)
    other.open(1, stream=3, by_coordinator=3)
    other.chunk(1, stream=3)
    other.handle(events.BytesVerified(3))
    other.commit(1, stream=3)
    with pytest.raises(e.UpdateInProgress):
        other.open(4, stream=4)


def test_a_trainers_update_yields_to_no_catch_up() -> None:
    agent = poisoned(1)
    agent.open(4, stream=3)
    with pytest.raises(e.UpdateInProgress):
        agent.open(1, stream=4, by_coordinator=3)
    assert Term(3) == agent.core.coordinator_term


# ---- what people see of refusals ----


def test_the_latest_refused_version_is_kept_beside_the_applied() -> None:
    agent = Agent()
    agent.apply(2)
    agent.now = 5.0
    with pytest.raises(e.StaleVersion):
        agent.open(1, stream=2)
    refused = agent.core.refused
    assert refused is not None
    assert (refused.version, refused.reason, refused.at) == (version(1), "STALE_VERSION", 5.0)
    agent.now = 7.0
    agent.receive(3, stream=3)
    agent.handle(events.StreamEnded(3, "gone"))
    refused = agent.core.refused
    assert refused is not None
    assert (refused.version, refused.reason, refused.at) == (version(3), "UPDATE_ABORTED", 7.0)
    assert agent.applied == version(2)


def test_a_mixture_is_healed_by_a_sleep_that_drops_it_only_as_far_as_unset() -> None:
    agent = poisoned(1)
    assert agent.core.state.held_by(HoldKind.POISONED) is not None
    agent.handle(events.SleepRequested("ann", core.DROPS_WEIGHTS))
    assert agent.core.state.weights == Unset()
    assert agent.core.state.held_by(HoldKind.POISONED) is None
