"""Corners of the core that nothing else turns: what is refused out of order, words for people, errors built anew."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.core import engine_events as events
from controlplane.core import errors as e
from controlplane.core.assembly import Assembly
from controlplane.core.engine_admission import MAX_LAYOUTS
from controlplane.core.engine_state import Hold, HoldKind, Life, Poisoned, Stage
from controlplane.core.errors.tree import PUBLIC
from controlplane.core.layout import DType, Layout, TensorSpec
from controlplane.core.pauses import MAX_INSTALL_WAIT_SECONDS, PauseMode, PausePolicy
from controlplane.core.pins import Pin
from controlplane.core.versions import EngineId, Term, UpdateId
from tests.support.engine_core import LAYOUT, Agent, Streaming, version


def opened() -> Agent:
    agent = Agent()
    agent.open(1)
    return agent


def test_a_chunk_before_its_layout_and_a_second_layout_are_out_of_order() -> None:
    agent = opened()
    with pytest.raises(e.FrameOutOfOrder, match="the layout"):
        agent.chunk(1)
    agent.handle(events.LayoutArrived(1, LAYOUT))
    with pytest.raises(e.FrameOutOfOrder, match="a layout"):
        agent.handle(events.LayoutArrived(1, LAYOUT))


def test_a_chunk_after_ready_is_out_of_order() -> None:
    agent = Agent()
    agent.receive(1)
    with pytest.raises(e.FrameOutOfOrder, match="commit"):
        agent.chunk(1)


def test_a_layout_that_the_open_frame_did_not_name_is_refused() -> None:
    other = Layout((TensorSpec("other", DType.F32, (1,)),))
    with pytest.raises(e.LayoutUnknown):
        opened().handle(events.LayoutArrived(1, other))


def test_inv3_a_manifest_of_another_size_than_its_layout_is_refused_before_a_byte_comes() -> None:
    agent = Agent()
    state, size = agent.core.state, LAYOUT.byte_count + 1
    who = (state.run_id, state.model, state.incarnation, UpdateId("u1"), Term(1), version(1))
    agent.handle(events.Opened(1, *who, LAYOUT.digest, len(LAYOUT.tensors), size))
    with pytest.raises(e.ByteCountMismatch, match="manifest"):
        agent.handle(events.LayoutArrived(1, LAYOUT))


def test_only_a_streaming_update_is_admitted_as_one() -> None:
    agent = opened()
    agent.handle(events.LayoutArrived(1, LAYOUT))
    with pytest.raises(e.FrameOutOfOrder, match="admission"):
        agent.handle(events.StreamAdmitted(1))


def test_inv7_the_start_of_an_install_is_judged_by_itself_whatever_ended_its_stream_before() -> None:
    """A higher term ends the update where it is seen; this holds if that were missed."""
    agent = Agent()
    agent.receive(1)
    agent.core.term = Term(2)
    with pytest.raises(e.StaleTerm):
        agent.commit(1)
    assert (agent.stage, agent.applied) == (Stage.READY, None)


def test_a_chunk_after_all_of_a_streaming_update_is_in_is_out_of_order() -> None:
    agent = Streaming()
    agent.all_in()
    with pytest.raises(e.FrameOutOfOrder, match="commit"):
        agent.part(1)


def test_the_oldest_of_many_layouts_is_forgotten_and_asked_for_again() -> None:
    agent = Agent()
    agent.core._layouts = {bytes([i] * 32): LAYOUT for i in range(MAX_LAYOUTS)}
    agent.apply(1)
    assert len(agent.core._layouts) == MAX_LAYOUTS
    assert bytes(32) not in agent.core._layouts
    assert LAYOUT.digest in agent.core._layouts


def test_a_doubt_of_what_it_holds_poisons_and_one_of_what_it_held_is_void() -> None:
    agent = Agent()
    agent.apply(1)
    assert agent.handle(events.Doubted(version(7), "the others differ")) == []
    assert agent.applied == version(1)
    agent.handle(events.Doubted(version(1), "the others differ"))
    assert isinstance(agent.core.state.weights, Poisoned)


def test_a_woken_engine_that_nobody_asked_to_wake_changes_nothing() -> None:
    agent = Agent()
    before = agent.core.state
    agent.handle(events.Woke(kv=True))
    assert agent.core.state == before


def test_a_stopping_engine_neither_sleeps_nor_wakes() -> None:
    agent = Agent()
    agent.handle(events.Stopping())
    assert agent.core.state.life is Life.STOPPING
    for event in (events.SleepRequested("ann", 1), events.WakeRequested("ann", kv=True)):
        with pytest.raises(e.EngineNotReady):
            agent.handle(event)


def test_the_word_for_people_is_the_worst_that_is_true() -> None:
    agent = Agent()
    agent.apply(1)
    agent.welcome(1, version(1))
    words = []
    for kind in (HoldKind.OPERATOR, HoldKind.STALLED, HoldKind.DRAINING):
        agent.handle(events.HoldChanged(Hold(kind, "ann"), present=True))
        words.append(agent.core.state.word(agent.core.served))
    agent.handle(events.SleepRequested("ann", 1))
    words.append(agent.core.state.word(agent.core.served))
    assert words == ["held", "stalled", "draining", "asleep"]


def test_a_checksum_of_what_did_not_come_is_asked_for_in_vain() -> None:
    with pytest.raises(LookupError, match="tensor 1"):
        Assembly(LAYOUT).checksum(1)


@pytest.mark.parametrize(
    ("policy", "word"),
    [
        (PausePolicy(PauseMode.WAIT, 1.0, PauseMode.WAIT), "keep or abort"),
        (PausePolicy(PauseMode.WAIT, -1.0), "no time to wait"),
        (PausePolicy(PauseMode.WAIT, MAX_INSTALL_WAIT_SECONDS + 1), "at most"),
        (PausePolicy(PauseMode.WAIT, 1.0), ""),
    ],
)
def test_a_pause_that_cannot_be_meant_says_why(policy: PausePolicy, word: str) -> None:
    assert word in policy.problem_at_an_install
    assert bool(policy.problem_at_an_install) is bool(word)


def test_a_pin_reads_as_what_it_wants() -> None:
    assert str(Pin()) == "any"
    assert not Pin().wants
    assert str(Pin(min_version=version(3), max_lag=1)) == "1.3 or later and a lag of at most 1"
    assert str(Pin(exact_version=version(3))) == "exactly 1.3"


@pytest.mark.parametrize("cls", e.error_classes(), ids=lambda c: c.reason)
def test_every_error_is_built_anew_from_nothing_but_its_reason(cls: type[e.WeightplaneError]) -> None:
    """A peer of another release may leave attributes out."""
    if cls.__module__ == PUBLIC:
        built = e.rebuild(cls.reason, {})
        assert type(built) is cls
    assert e.rebuild("NO_SUCH_REASON", {}) is None


def test_an_update_for_another_engine_is_refused_by_its_name() -> None:
    agent = Agent()
    head = agent_head(agent)
    with pytest.raises(e.UnknownEngine, match="this is e0"):
        agent.handle(events.Opened(**head | {"engine_id": EngineId("e9")}))


def agent_head(agent: Agent) -> dict[str, Any]:
    state = agent.core.state
    return {
        "stream": 1,
        "run_id": state.run_id,
        "model": state.model,
        "incarnation": state.incarnation,
        "update_id": "u1",
        "writer_term": 1,
        "version": version(1),
        "layout_digest": LAYOUT.digest,
        "tensor_count": 2,
        "byte_count": LAYOUT.byte_count,
    }
