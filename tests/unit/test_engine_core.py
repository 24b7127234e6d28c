"""The engine agent's decisions, event by event: INV-1, 3, 4, 5, 6, 7 at their keeper."""

from __future__ import annotations

import pytest

from controlplane.core import engine_effects as fx
from controlplane.core import engine_events as events
from controlplane.core import errors as e
from controlplane.core.engine_state import Held, Hold, HoldKind, Life, Poisoned, Stage, Timings
from controlplane.core.layout import DType, Layout, TensorSpec, content_digest
from controlplane.core.versions import Term
from tests.support.engine_core import LAYOUT, Agent, checksums, version


def test_v3_the_old_version_is_claimed_between_any_two_frames_before_the_commit() -> None:
    agent = Agent()
    agent.apply(1)
    agent.receive(2, stream=2, seed=5)
    assert agent.applied == version(1)


def test_inv1_unset_from_quiesced_until_the_canary_spoke() -> None:
    agent = Agent()
    agent.apply(1)
    agent.receive(2, stream=2, seed=5)
    agent.commit(2, stream=2, seed=5)
    assert agent.applied == version(1)
    agent.handle(events.Quiesced())
    assert agent.applied is None
    agent.handle(events.CanaryPassed(Timings()))
    assert agent.core.state.weights == Held(version(2), content_digest(checksums(5)))


def test_inv3_the_end_of_a_stream_is_an_abort_and_never_a_commit() -> None:
    agent = Agent()
    agent.apply(1)
    agent.receive(2, stream=2, seed=5)
    effects = agent.handle(events.StreamEnded(2, "gone"))
    assert fx.DropStaged(2) in effects
    assert (agent.applied, agent.stage) == (version(1), Stage.ABORTED)
    with pytest.raises(e.UpdateAborted):
        agent.commit(2, stream=2, seed=5)


def test_inv3_a_stream_may_end_once_its_commit_was_taken() -> None:
    agent = Agent()
    agent.receive(1)
    agent.commit(1)
    assert agent.handle(events.StreamEnded(1, "gone")) == []
    agent.handle(events.Quiesced())
    agent.handle(events.CanaryPassed(Timings()))
    assert agent.applied == version(1)


@pytest.mark.parametrize(
    ("chunks", "byte_count", "seed", "error"),
    [(2, 28, 1, e.ByteCountMismatch), (1, 27, 1, e.ByteCountMismatch), (1, 28, 9, e.ChecksumMismatch)],
)
def test_m3_a_commit_that_does_not_state_what_came_is_refused(
    chunks: int, byte_count: int, seed: int, error: type[e.WeightplaneError]
) -> None:
    agent = Agent()
    agent.receive(1)
    with pytest.raises(error):
        agent.handle(events.CommitArrived(1, version(1), chunks, byte_count, content_digest(checksums(seed))))
    assert agent.stage is Stage.READY


def test_v5_a_commit_before_every_byte_was_checked_is_refused() -> None:
    agent = Agent()
    agent.open(1)
    agent.handle(events.LayoutArrived(1, LAYOUT))
    agent.chunk(1)
    with pytest.raises(e.FrameOutOfOrder):
        agent.commit(1)


def test_inv4_a_failure_before_the_first_byte_leaves_the_old_version_in_force() -> None:
    agent = Agent()
    agent.apply(1)
    agent.welcome(1, version(1))
    agent.receive(2, stream=2, seed=5)
    agent.commit(2, stream=2, seed=5)
    assert not agent.core.gate_open
    agent.handle(events.InstallEnded(e.DeadlineExceeded("quiesce", "the last tokens", 1.0), touched=False))
    assert agent.applied == version(1)
    assert agent.core.gate_open


def test_inv4_a_failure_after_the_first_byte_is_poison_and_only_a_full_update_heals_it() -> None:
    agent = Agent()
    agent.apply(1)
    agent.welcome(1, version(1))
    agent.receive(2, stream=2, seed=5)
    agent.commit(2, stream=2, seed=5)
    agent.handle(events.Quiesced())
    agent.handle(events.InstallEnded(e.InstallFailed("e0", "1.2", True, "boom"), touched=True))
    assert isinstance(agent.core.state.weights, Poisoned)
    assert agent.applied is None
    assert not agent.core.gate_open
    agent.apply(3, stream=3, seed=7)
    agent.welcome(1, version(3))
    assert agent.core.gate_open


def test_v4_the_new_version_is_never_claimed_by_a_failed_install() -> None:
    agent = Agent()
    agent.receive(1)
    agent.commit(1)
    agent.handle(events.Quiesced())
    agent.handle(events.InstallEnded(e.CanaryFailed("e0", "1.1", "NaN"), touched=True))
    assert agent.applied is None
    assert agent.stage is Stage.FAILED


def test_inv5_a_version_below_one_applied_in_this_incarnation_is_refused() -> None:
    agent = Agent()
    agent.apply(7)
    with pytest.raises(e.StaleVersion) as refusal:
        agent.open(6, stream=2)
    assert (refusal.value.applied, refusal.value.got) == (7, 6)
    assert agent.applied == version(7)


def test_inv6_the_same_update_before_its_commit_starts_anew_and_ends_the_older_stream() -> None:
    agent = Agent()
    agent.receive(1)
    effects = agent.open(1, stream=2)
    assert any(isinstance(x, fx.EndStream) and x.stream == 1 for x in effects)
    agent.chunk(1, stream=2)
    with pytest.raises(e.UpdateAborted):
        agent.commit(1, stream=1)


def test_inv6_the_same_update_after_its_commit_attaches() -> None:
    agent = Agent()
    agent.receive(1)
    agent.commit(1)
    assert fx.Accept(2, layout_needed=False, attached=True) in agent.open(1, stream=2)
    agent.handle(events.Quiesced())
    agent.handle(events.CanaryPassed(Timings()))
    assert fx.Accept(3, layout_needed=False, attached=True) in agent.open(1, stream=3)


def test_inv6_done_is_answered_only_while_it_is_held_now() -> None:
    agent = Agent()
    agent.apply(1)
    agent.handle(events.SpansDisagreed("not what the engine says"))
    effects = agent.open(1, stream=2)
    assert fx.Accept(2, layout_needed=False, attached=False) in effects


def test_inv6_the_same_version_with_other_content_is_a_conflict() -> None:
    agent = Agent()
    agent.apply(1, seed=1)
    agent.handle(events.SpansDisagreed("poisoned"))
    agent.receive(1, stream=2, seed=5, update_id="other")
    with pytest.raises(e.VersionConflict):
        agent.commit(1, stream=2, seed=5)


def test_inv7_nothing_is_taken_before_the_welcome() -> None:
    with pytest.raises(e.NotWelcomed):
        Agent(welcomed=False).open(1)


def test_inv7_a_lower_term_than_the_disk_remembers_is_refused() -> None:
    agent = Agent(term=5)
    with pytest.raises(e.StaleTerm) as refusal:
        agent.open(1, term=4)
    assert (refusal.value.got, refusal.value.current) == (4, 5)


def test_inv7_a_higher_term_ends_an_update_of_a_lower_one_before_its_install() -> None:
    agent = Agent()
    agent.receive(1)
    effects = agent.welcome(2)
    assert any(isinstance(x, fx.EndStream) and isinstance(x.error, e.StaleTerm) for x in effects)
    assert fx.Remember(Term(2), Term(1), 0) in effects
    with pytest.raises(e.UpdateAborted):
        agent.commit(1)


def test_inv7_an_install_that_began_runs_to_its_end() -> None:
    agent = Agent()
    agent.receive(1)
    agent.commit(1)
    agent.welcome(2)
    agent.handle(events.Quiesced())
    agent.handle(events.CanaryPassed(Timings()))
    assert agent.applied == version(1)


def test_inv7_an_old_coordinators_words_are_refused() -> None:
    agent = Agent()
    agent.welcome(1, coordinator_term=3)
    with pytest.raises(e.StaleTerm):
        agent.welcome(1, version(9), coordinator_term=2)
    assert agent.core.served == frozenset()


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"run": "other"}, e.WrongRun),
        ({"model": "teacher"}, e.WrongModel),
        ({"incarnation": "life-0"}, e.WrongIncarnation),
    ],
)
def test_l2_l7_words_for_another_run_model_or_life_are_refused(
    changed: dict[str, str], error: type[e.WeightplaneError]
) -> None:
    agent = Agent()
    with pytest.raises(error):
        agent.open(1, **changed)  # type: ignore[arg-type]
    assert agent.core.update is None


def test_g1_a_second_writer_is_told_who_holds_the_stream() -> None:
    agent = Agent()
    agent.receive(1)
    with pytest.raises(e.UpdateInProgress) as refusal:
        agent.open(2, stream=2)
    assert refusal.value.update_id == "u1"


def test_m2_a_layout_that_does_not_cover_the_engine_is_refused_by_name() -> None:
    agent = Agent()
    short = Layout((TensorSpec("a", DType.F32, (2, 2)),))
    agent.open(1, layout=short)
    with pytest.raises(e.ManifestIncomplete) as refusal:
        agent.handle(events.LayoutArrived(1, short))
    assert refusal.value.names == ["b"]


def test_a_layout_is_sent_once_and_then_named_by_its_digest() -> None:
    agent = Agent()
    agent.apply(1)
    assert fx.Accept(2, layout_needed=False, attached=False) in agent.open(2, stream=2)


def test_v2_an_update_to_a_paused_engine_ends_applied_and_the_gate_stays_as_the_operator_left_it() -> None:
    agent = Agent()
    hold = Hold(HoldKind.OPERATOR, "me")
    agent.handle(events.HoldChanged(hold, present=True))
    agent.apply(1)
    agent.welcome(1, version(1))
    assert agent.applied == version(1)
    assert not agent.core.gate_open
    agent.handle(events.HoldChanged(hold, present=False))
    assert agent.core.gate_open


def test_an_operators_resume_in_mid_install_opens_nothing() -> None:
    agent = Agent()
    agent.apply(1)
    agent.welcome(1, version(1))
    agent.receive(2, stream=2, seed=5)
    agent.commit(2, stream=2, seed=5)
    agent.handle(events.HoldChanged(Hold(HoldKind.OPERATOR, "me"), present=False))
    assert not agent.core.gate_open


def test_a_death_leaves_nothing_held_and_ends_the_update() -> None:
    agent = Agent()
    agent.apply(1)
    agent.receive(2, stream=2, seed=5)
    effects = agent.handle(events.Died("killed"))
    assert any(isinstance(x, fx.EndStream) for x in effects)
    assert (agent.applied, agent.core.state.life) == (None, Life.DEAD)
    with pytest.raises(e.EngineNotReady):
        agent.open(3, stream=3)
