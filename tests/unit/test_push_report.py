"""What a push came to: engines that were brought just what they held are named, in the log and to the loop."""

from __future__ import annotations

from structlog.testing import capture_logs

from tests.support.shown_fleet import version
from trainer_agent.rank.report import PushReport, report_of
from weightplane.local.v1 import rank_pb2
from weightplane.v1 import engine_pb2, fleet_pb2, version_pb2

TENSORS = 34


def applied(name: str, changed: int | None) -> fleet_pb2.EngineOutcome:
    return fleet_pb2.EngineOutcome(
        engine=version_pb2.EngineRef(engine_id=name, incarnation="1"),
        stage=engine_pb2.UPDATE_STAGE_APPLIED,
        changed_tensors=changed,
        tensor_count=TENSORS,
    )


def reported(*engines: fleet_pb2.EngineOutcome) -> tuple[PushReport, list[str]]:
    """The report, and the engines that the log warns of."""
    state = fleet_pb2.UpdateState(version=version(2, 7), phase=fleet_pb2.UPDATE_PHASE_COMMITTED, engines=engines)
    with capture_logs() as logs:
        report = report_of(rank_pb2.PushResult(state=state), step=5, seconds=1.0)
    warned = [line for line in logs if line["event"] == "nothing_changed"]
    for line in warned:
        said = {"log_level": "warning", "tensors": TENSORS, "version": "2.7", "step": 5}
        assert {key: line[key] for key in said} == said
    return report, [line["engine_id"] for line in warned]


def test_an_engine_of_which_no_tensor_changed_is_warned_of_by_name() -> None:
    report, warned = reported(applied("same", 0), applied("other", 1))
    assert report.unchanged == warned == ["same"]
    assert report.changed == {"same": (0, TENSORS), "other": (1, TENSORS)}


def test_an_engines_first_version_is_no_warning() -> None:
    """It held nothing that could be compared."""
    report, warned = reported(applied("fresh", None))
    assert report.unchanged == warned == []
    assert report.changed == {}


def test_who_did_not_apply_it_is_not_said_to_be_unchanged() -> None:
    failed = applied("failed", 0)
    failed.stage = engine_pb2.UPDATE_STAGE_FAILED
    assert reported(failed)[1] == []
