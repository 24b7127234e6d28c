"""What each refusal means to a trainer that pushes: every reason of the tree is classified."""

from __future__ import annotations

import pytest

from controlplane.core import errors as e
from controlplane.rpc.errors import RemoteError
from tests.support.update_states import FAILED, state
from trainer_agent.agent import outcome, reasons
from trainer_agent.agent.reasons import Begin

STALE = e.StaleTerm(model="policy", got=1, current=2)
KNOWS_LESS = e.StaleTerm(model="policy", got=5, current=3)
REGRESSED = e.LedgerRegressed(what="number", known=3, seen=5, who="e0")
FROZEN = e.ModelFrozen(model="policy", problem="toy cannot train it")
RECOVERING = e.CoordinatorRecovering(term=2, engines=["e0"])
TOO_FEW = e.NotEnoughEngines(model="policy", group="decode", live=1, needed=2)
REPEATED = e.RequestRepeated(request_id="r", update_id="u", version="1.1")
CONFLICT = e.RequestConflict(request_id="r", field="layout", expected="a", got="b")


def known() -> set[str]:
    return {cls.reason for cls in e.error_classes() if cls.__module__ == e.__name__}


@pytest.mark.parametrize("reason", sorted(known()))
def test_every_reason_of_the_tree_is_classified_once(reason: str) -> None:
    assert (reason in reasons.PERMANENT) != (reason in reasons.PASSING), f"classify {reason} in trainer_agent's reasons"


def test_no_rule_names_a_reason_that_does_not_exist() -> None:
    rules = reasons.PERMANENT | reasons.PASSING | reasons.HELLO_WAITS | reasons.BEGIN_WAITS
    assert rules <= known()


def test_nothing_is_waited_for_that_the_next_attempt_would_meet_again() -> None:
    assert not (reasons.HELLO_WAITS | reasons.BEGIN_WAITS) & reasons.PERMANENT


@pytest.mark.parametrize(
    ("error", "engines", "passes"),
    [
        (outcome.update_failed(state(FAILED), "lost", {}), [""], True),
        (outcome.update_failed(state(FAILED), "idle", {}), ["UPDATE_ABORTED", "INSTALL_FAILED"], True),
        (outcome.update_failed(state(FAILED), "asleep", {}), ["ENGINE_ASLEEP", "ENGINE_DRAINING"], True),
        (outcome.update_failed(state(FAILED), "lent", {}), ["DEVICES_TAKEN", "BASE_MISMATCH"], True),
        (outcome.update_failed(state(FAILED), "shape", {}), ["", "SHAPE_MISMATCH"], False),
        (outcome.update_failed(state(FAILED), "frozen", {}), ["MODEL_FROZEN"], False),
        (outcome.update_failed(state(FAILED), "cannot", {}), ["UNSUPPORTED_BY_ENGINE"], False),
        (e.PeerLost(peer="rank 1", cause="closed"), [], True),
        (e.DeadlineExceeded(phase="gather_group", waited_for="rank 1", waited_seconds=1), [], True),
        (e.DeadlineExceeded(phase="push (preparing)", waited_for="e0", waited_seconds=1), [], False),
        (STALE, [], False),
        (e.LayoutInvalid(problem="p", names=[]), [], False),
    ],
)
def test_a_push_is_repeated_only_for_what_a_new_number_can_heal(
    error: e.WeightplaneError, engines: list[str], passes: bool
) -> None:
    assert reasons.update_passes(error, engines) is passes


@pytest.mark.parametrize(
    ("error", "enough_before", "answer"),
    [
        (RemoteError(code="UNAVAILABLE", text=""), False, Begin.WAIT),
        (RemoteError(code="INTERNAL", text=""), False, Begin.END),
        (RECOVERING, False, Begin.WAIT),
        (REGRESSED, False, Begin.WAIT),
        (e.LedgerError(path="ledger.sqlite", cause="the disk is full"), False, Begin.WAIT),
        (e.UpdateInProgress(update_id="u", version="1.1"), False, Begin.WAIT),
        (e.NoEngines(model="policy", known=0), False, Begin.END),
        (e.NoEngines(model="policy", known=1), True, Begin.WAIT),
        (TOO_FEW, False, Begin.END),
        (TOO_FEW, True, Begin.WAIT),
        (FROZEN, True, Begin.END),
        (STALE, True, Begin.END),
        (KNOWS_LESS, True, Begin.WAIT),
        (e.WrongRun(expected="a", got="b"), True, Begin.END),
    ],
)
def test_a_begin_waits_for_a_coordinator_but_not_for_engines_that_never_came(
    error: e.WeightplaneError, enough_before: bool, answer: Begin
) -> None:
    assert reasons.begin(error, enough_before=enough_before, renewed=False) is answer


@pytest.mark.parametrize("error", [REPEATED, CONFLICT])
def test_a_request_id_that_is_used_up_is_changed_once(error: e.WeightplaneError) -> None:
    assert reasons.begin(error, enough_before=False, renewed=False) is Begin.ANEW
    assert reasons.begin(error, enough_before=False, renewed=True) is Begin.END


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (RemoteError(code="UNAVAILABLE", text=""), True),
        (RemoteError(code="UNIMPLEMENTED", text=""), False),
        (e.LeaseHeld(model="policy", holder="t", incarnation="i", term=1, remaining_seconds=3.0), True),
        (RECOVERING, True),
        (REGRESSED, True),
        (e.PeerLost(peer="the coordinator", cause="its ledger was accepted; come again"), True),
        (FROZEN, False),
        (STALE, False),
        (e.EngineMisfit(engine_id="e0", held=1, total=2, missing=["GPU-1"]), False),
    ],
)
def test_the_lease_is_waited_for_unless_it_will_never_be_given(error: e.WeightplaneError, passes: bool) -> None:
    assert reasons.hello_passes(error) is passes


def test_inv_7_only_a_coordinator_that_knows_a_later_term_fences() -> None:
    assert reasons.fences(STALE)
    assert not reasons.fences(KNOWS_LESS), "a coordinator with an older ledger knows nobody later"
    assert reasons.waits_for_a_person(KNOWS_LESS)
    assert reasons.waits_for_a_person(REGRESSED)
    assert not reasons.waits_for_a_person(RECOVERING)
    assert not reasons.fences(None)
