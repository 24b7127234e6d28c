"""A streaming update at the agent's core: INV-1, 3, 4, 7 attacked where the first byte is the start of the install."""

from __future__ import annotations

import pytest

from controlplane.core import engine_effects as fx
from controlplane.core import engine_events as events
from controlplane.core import errors as e
from controlplane.core.engine_state import Held, Hold, HoldKind, KeptBase, Poisoned, Stage, Timings
from controlplane.core.layout import content_digest
from tests.support.engine_core import LAYOUT, Agent, Streaming, checksums, version


def cut_of(effects: list[fx.Effect]) -> fx.CutStreaming:
    return next(x for x in effects if isinstance(x, fx.CutStreaming))


def test_ready_is_said_before_the_first_byte_and_the_old_version_serves_until_it_comes() -> None:
    agent = Streaming()
    agent.open(2, stream=2, streaming=True)
    assert fx.SendReady(2) in agent.handle(events.StreamAdmitted(2))
    assert (agent.stage, agent.applied, agent.core.gate_open) == (Stage.READY, version(1), True)


def test_inv4_an_end_before_the_first_chunk_costs_nothing() -> None:
    agent = Streaming()
    agent.admit()
    agent.handle(events.StreamEnded(2, "gone"))
    assert (agent.stage, agent.applied, agent.core.gate_open) == (Stage.ABORTED, version(1), True)


def test_the_first_chunk_starts_the_install_and_shuts_the_gate() -> None:
    agent = Streaming()
    agent.admit()
    effects = agent.part(0)
    assert any(isinstance(x, fx.StartStreaming) for x in effects)
    assert (agent.stage, agent.core.gate_open) == (Stage.INSTALLING, False)
    assert not any(isinstance(x, fx.StartStreaming) for x in agent.part(1))


def test_a_chunk_before_ready_is_refused() -> None:
    agent = Streaming()
    agent.open(2, stream=2, streaming=True)
    with pytest.raises(e.FrameOutOfOrder, match="ready"):
        agent.part(0)


def test_inv1_unset_from_before_the_first_byte_until_the_canary_spoke() -> None:
    agent = Streaming()
    agent.touch()
    assert agent.applied is None
    agent.part(1)
    agent.handle(events.BytesVerified(2))
    agent.commit_streamed()
    assert agent.applied is None
    agent.handle(events.CanaryPassed(Timings()))
    assert agent.core.state.weights == Held(version(2), content_digest(checksums(5)))


def test_inv3_no_install_is_claimed_without_its_commit_frame() -> None:
    agent = Streaming()
    agent.all_in()
    with pytest.raises(AssertionError, match="INV-3"):
        agent.handle(events.CanaryPassed(Timings()))


@pytest.mark.parametrize(
    ("chunks", "byte_count", "seed", "error"),
    [(3, 28, 5, e.ByteCountMismatch), (2, 27, 5, e.ByteCountMismatch), (2, 28, 9, e.ChecksumMismatch)],
)
def test_inv3_a_commit_that_does_not_state_what_came_finishes_nothing(
    chunks: int, byte_count: int, seed: int, error: type[e.WeightplaneError]
) -> None:
    agent = Streaming()
    agent.all_in()
    with pytest.raises(error):
        agent.commit_streamed(chunks=chunks, byte_count=byte_count, seed=seed)
    cut = cut_of(agent.handle(events.StreamEnded(2, "refused")))
    agent.handle(events.InstallEnded(cut.error, touched=True))
    assert isinstance(agent.core.state.weights, Poisoned)


def test_inv3_inv4_an_end_after_the_first_byte_is_poison_and_a_full_update_heals_it() -> None:
    agent = Streaming()
    agent.all_in()  # every byte came, and was right: still the end is no commit
    cut = cut_of(agent.handle(events.StreamEnded(2, "gone")))
    with pytest.raises(e.UpdateAborted):
        agent.commit_streamed()
    agent.handle(events.InstallEnded(cut.error, touched=True))
    assert isinstance(agent.core.state.weights, Poisoned)
    assert not agent.core.gate_open
    agent.apply(3, stream=3, seed=7)
    assert agent.applied == version(3)


def test_a_stream_that_ends_before_the_engine_stood_still_leaves_the_old_version_serving() -> None:
    agent = Streaming()
    agent.admit()
    agent.part(0)
    cut = cut_of(agent.handle(events.StreamEnded(2, "gone")))
    agent.handle(events.InstallEnded(cut.error, touched=False))
    assert (agent.applied, agent.core.gate_open) == (version(1), True)


def test_inv6_a_stream_may_end_once_its_commit_was_taken_and_the_same_update_attaches() -> None:
    agent = Streaming()
    agent.all_in()
    assert [type(x) for x in agent.commit_streamed()] == [fx.FinishStreaming]
    assert agent.handle(events.StreamEnded(2, "gone")) == []
    again = agent.open(2, stream=3, streaming=True)
    assert fx.Accept(3, layout_needed=False, attached=True) in again


def test_inv6_before_its_commit_the_same_update_does_not_attach_to_an_install_that_may_never_end() -> None:
    agent = Streaming()
    agent.touch()
    with pytest.raises(e.UpdateInProgress):
        agent.open(2, stream=3, streaming=True)


def test_inv7_a_higher_term_ends_a_streaming_install_that_has_no_commit() -> None:
    agent = Streaming()
    agent.touch()
    effects = agent.welcome(2, version(1), coordinator_term=1)
    assert isinstance(cut_of(effects).error, e.StaleTerm)
    assert any(isinstance(x, fx.EndStream) for x in effects)
    with pytest.raises(e.UpdateAborted):
        agent.part(1)


def test_inv7_a_higher_term_does_not_end_an_install_whose_commit_was_taken() -> None:
    agent = Streaming()
    agent.all_in()
    agent.commit_streamed()
    assert not any(isinstance(x, fx.CutStreaming) for x in agent.welcome(2, version(1)))
    agent.handle(events.CanaryPassed(Timings()))
    assert agent.applied == version(2)


def test_inv7_each_chunk_is_judged_by_its_writers_term() -> None:
    agent = Streaming()
    agent.admit()
    agent.core.term = type(agent.core.term)(7)  # as if it was learnt in a way that ends no stream
    with pytest.raises(e.StaleTerm):
        agent.part(0)
    assert agent.applied == version(1)


def test_a_drain_lets_a_streaming_install_come_to_its_end() -> None:
    agent = Streaming()
    agent.touch()
    hold = Hold(HoldKind.DRAINING, "operator")
    assert not any(isinstance(x, fx.CutStreaming) for x in agent.handle(events.HoldChanged(hold, present=True)))
    assert agent.stage is Stage.INSTALLING


def test_an_engine_that_dies_in_a_streaming_install_ends_its_stream_and_decides_it() -> None:
    agent = Streaming()
    agent.touch()
    effects = [type(x) for x in agent.handle(events.Died("gone"))]
    assert fx.InstallDecided in effects
    assert fx.EndStream in effects


def test_an_engine_without_the_capability_refuses_before_anything_is_touched() -> None:
    agent = Agent()
    with pytest.raises(e.UnsupportedByEngine, match="streaming"):
        agent.open(1, streaming=True)


def test_a_delta_is_not_installed_as_it_comes() -> None:
    agent = Streaming()
    held = agent.core.state.weights
    assert isinstance(held, Held)
    kept = KeptBase(held, LAYOUT.digest, tuple(checksums(1)))
    with pytest.raises(e.UnsupportedByEngine, match="deltas"):
        agent.open(2, stream=2, base=held, kept=kept, streaming=True)
