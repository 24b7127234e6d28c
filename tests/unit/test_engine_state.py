"""The product life × weights × holds: the gate and the word are derived, and unset is equal to nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controlplane.core.engine_state import (
    EngineState,
    Held,
    Hold,
    HoldKind,
    Life,
    Poisoned,
    Progress,
    Stage,
    Unset,
)
from controlplane.core.errors import FrameInvalid
from controlplane.core.versions import EngineId, Incarnation, ModelName, RunId, Term, UpdateId, WeightVersion
from controlplane.rpc.engine_codec import state_from_proto, state_to_proto
from controlplane.rpc.validation import validate
from weightplane.v1 import engine_pb2

V1, V2 = WeightVersion(1, Term(1)), WeightVersion(2, Term(1))
HELD = Held(V1, b"d" * 32)
NEW = EngineState(RunId("run"), ModelName("policy"), EngineId("e0"), Incarnation("i"))
SERVING = replace(NEW, life=Life.RUNNING, weights=HELD)
HOLD = Hold(HoldKind.OPERATOR, "me")


def progress(stage: Stage) -> Progress:
    return Progress(UpdateId("u"), V2, stage)


@pytest.mark.parametrize(
    ("state", "served", "open_"),
    [
        (SERVING, {V1}, True),
        (SERVING, {V1, V2}, True),
        (SERVING, set(), False),
        (SERVING, {V2}, False),
        (replace(SERVING, life=Life.STOPPING), {V1}, False),
        (replace(SERVING, weights=Unset()), {V1}, False),
        (replace(SERVING, weights=Poisoned("x")), {V1}, False),
        (replace(SERVING, holds=frozenset({HOLD})), {V1}, False),
    ],
)
def test_the_gate_is_open_iff_what_is_held_is_served_and_nobody_holds_it(
    state: EngineState, served: set[WeightVersion], open_: bool
) -> None:
    assert state.gate_open(frozenset(served)) is open_


@pytest.mark.parametrize(
    ("state", "word"),
    [
        (NEW, "starting"),
        (replace(NEW, life=Life.DEAD, weights=HELD), "dead"),
        (replace(NEW, life=Life.RUNNING), "empty"),
        (replace(NEW, life=Life.RUNNING, progress=progress(Stage.RECEIVING)), "receiving"),
        (replace(SERVING, progress=progress(Stage.RECEIVING)), "serving"),
        (replace(SERVING, progress=progress(Stage.INSTALLING)), "installing"),
        (replace(SERVING, weights=Poisoned("x"), holds=frozenset({HOLD})), "poisoned"),
        (replace(SERVING, weights=Poisoned("x"), progress=progress(Stage.INSTALLING)), "installing"),
        (replace(SERVING, holds=frozenset({HOLD})), "held"),
        (SERVING, "serving"),
        (replace(SERVING, weights=Held(V2, b"")), "ready"),
    ],
)
def test_the_word_is_derived_from_the_whole_state(state: EngineState, word: str) -> None:
    assert state.word(frozenset({V1})) == word


@pytest.mark.parametrize("weights", [Unset(), HELD, Poisoned("a mixture")])
@pytest.mark.parametrize("stage", [None, *Stage])
def test_a_state_survives_the_wire(weights: Unset | Held | Poisoned, stage: Stage | None) -> None:
    state = replace(
        SERVING,
        weights=weights,
        holds=frozenset({HOLD, Hold(HoldKind.UPDATING, "u")}),
        progress=progress(stage) if stage else None,
        live_requests=3,
    )
    message = state_to_proto(state, frozenset({V1}))
    validate(message)
    assert state_from_proto(message) == state


def test_v11_unset_is_explicit_and_equal_to_no_version() -> None:
    message = state_to_proto(replace(SERVING, weights=Unset()), frozenset())
    assert not message.HasField("applied")
    assert message.weights == engine_pb2.WEIGHTS_STATE_UNSET
    assert state_from_proto(message).applied is None


def test_a_state_that_contradicts_itself_is_refused() -> None:
    message = state_to_proto(SERVING, frozenset())
    message.weights = engine_pb2.WEIGHTS_STATE_UNSET
    with pytest.raises(FrameInvalid):
        state_from_proto(message)


def test_versions_are_ordered_by_their_number_alone_and_are_never_negative() -> None:
    assert WeightVersion(2, Term(1)) > WeightVersion(1, Term(9))
    with pytest.raises(ValueError, match="not negative"):
        WeightVersion(-1, Term(1))
