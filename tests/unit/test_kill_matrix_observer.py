"""The kill matrix's observer cries out at each wrong claim: a matrix that sees nothing would pass for ever."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from controlplane.core.fleet_records import UpdateBegan, UpdateDecided
from controlplane.core.update_transaction import Phase
from controlplane.core.versions import ModelName, Term, UpdateId, WeightVersion
from controlplane.rpc.channels import open_channel
from tests.kill_matrix.matrix import Outcome
from tests.kill_matrix.observer import Ledger, Observer
from tests.kill_matrix.truth import MemoryTruth
from weightplane.v1 import engine_pb2, rollout_pb2, version_pb2

TRUTH = MemoryTruth()


@pytest.fixture
async def observer(tmp_path: Path) -> AsyncIterator[Observer]:
    """Of an engine in a fleet where numbers 1 and 2 were given to steps 11 and 12, and 1 was committed."""
    log = tmp_path / "coordinator.log"
    model = ModelName("policy")
    numbers = {n: WeightVersion(number=n, term=Term(1)) for n in (1, 2)}
    records = [UpdateBegan(UpdateId(f"u{n}"), f"r{n}", model, v, 10 + n, ()) for n, v in numbers.items()]
    decided = UpdateDecided(UpdateId("u1"), model, Phase.COMMITTED, "", (), 1)
    lines = [
        json.dumps({"event": "record_written", "kind": type(r).__name__, "record": str(r)}) for r in (*records, decided)
    ]
    log.write_text("\n".join(lines) + "\n")
    async with open_channel("127.0.0.1:1") as channel:
        yield Observer("e0", channel, Ledger(log), TRUTH)


def claim(number: int, step: int, life: str = "life", **more: object) -> engine_pb2.EngineStatus:
    status = engine_pb2.EngineStatus(
        engine=version_pb2.EngineRef(engine_id="e0", incarnation=life),
        applied=version_pb2.WeightVersion(term=1, number=number),
        content_digest=TRUTH.content(step),
    )
    status.MergeFrom(engine_pb2.EngineStatus(**more))  # type: ignore[arg-type]
    return status


def installing(number: int) -> engine_pb2.UpdateProgress:
    version = version_pb2.WeightVersion(term=1, number=number)
    return engine_pb2.UpdateProgress(update_id="u2", version=version, stage=engine_pb2.UPDATE_STAGE_INSTALLING)


async def test_the_ledger_is_read_from_the_coordinators_log(observer: Observer) -> None:
    assert observer.ledger.newest == 2
    assert (observer.ledger.step(1), observer.ledger.step(3)) == (11, None)
    assert (observer.ledger.term(1), observer.ledger.term(3)) == (1, None)
    assert observer.ledger.outcome(1) is Outcome.COMMITTED
    assert observer.ledger.outcome(2) is None


async def test_true_claims_pass(observer: Observer) -> None:
    observer._judge(claim(1, 11))
    observer._judge(claim(1, 11, update=installing(2)))
    observer._judge(claim(2, 12))
    observer._judge(claim(1, 11, life="the next one"))
    assert observer.wrong == []


async def test_each_wrong_claim_is_seen(observer: Observer) -> None:
    observer._judge(claim(1, 12))
    observer._judge(claim(2, 12, update=installing(2)))
    observer._judge(claim(1, 11))
    observer._judge(engine_pb2.EngineStatus(engine=claim(1, 11).engine, gate_open=True))
    observer._judge(claim(3, 12))
    observer._judge(claim(2, 12, life="another", applied=version_pb2.WeightVersion(term=2)))
    said = ["other content", "while it installs", "after 2 in one life", "an open gate", "which no ledger knows"]
    said += ["of term 2, which was given to term 1"]
    assert len(observer.wrong) == len(said)
    assert all(word in wrong for word, wrong in zip(said, observer.wrong, strict=True))
    assert observer.claimed == {1, 2, 3}


async def test_tokens_of_other_weights_are_seen(observer: Observer) -> None:
    tokens = list(TRUTH.tokens(12))
    for number in (2, 1):
        version = version_pb2.WeightVersion(term=1, number=number)
        span = rollout_pb2.VersionSpan(version=version, start=0, end=len(tokens))
        assert observer._judge_sample(tokens, rollout_pb2.Finish(spans=[span])) == number
    assert len(observer.wrong) == 1
    assert "version 1 does not make" in observer.wrong[0]
