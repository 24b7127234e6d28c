"""A trainer that stood still while another took its lease, and comes back: refused by everybody, for good (INV-7).

All of them are processes of their own, as in the kill matrix, whose observers look at every version that is claimed.
"""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from controlplane.core.errors import WeightplaneError
from controlplane.exit_codes import ExitCode
from controlplane.processes import start_time
from controlplane.rpc.errors import from_rpc_error
from tests.kill_matrix.fleet import Daemon, Fleet, running_fleet
from tests.kill_matrix.matrix import Outcome
from tests.kill_matrix.observer import RUN, LogTail
from tests.support.eventually import eventually
from tests.support.writer import LAYOUT, Stream
from trainer_agent.agent.launch import lives
from weightplane.v1 import (
    fleet_pb2,
    fleet_pb2_grpc,
    version_pb2,
    weight_update_pb2,
)

pytestmark = pytest.mark.timeout(400)

START_SECONDS = 180.0
"""Until a fresh trainer's ranks have pushed."""


class Paused:
    """A daemon and all that it had started, stopped."""

    def __init__(self, daemon: Daemon) -> None:
        started = start_time(daemon.pid)
        assert started is not None, "the daemon lives"
        self._lives = {daemon.pid: started, **lives(daemon.pid)}
        assert len(self._lives) >= 4, "an agent, its launcher and two ranks"
        for pid in self._lives:  # parents first: none can start another that is missed
            os.kill(pid, signal.SIGSTOP)

    def go_on(self) -> None:
        for pid in reversed(self._lives):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    @property
    def left(self) -> list[int]:
        return [pid for pid, started in self._lives.items() if start_time(pid) == started]


@pytest.mark.parametrize(
    ("point", "arm"),
    [
        pytest.param("", "", id="idle", marks=pytest.mark.slow),
        pytest.param("trainer.between_chunks", "hold after=3", id="between two chunks"),
        pytest.param("trainer.before_commit", "hold", id="with go, before its commit frames", marks=pytest.mark.slow),
    ],
)
async def test_inv7_a_trainer_that_comes_back_after_a_takeover_is_refused_everywhere(
    tmp_path: Path, point: str, arm: str
) -> None:
    async with running_fleet(tmp_path / "fleet", trains=False) as fleet:
        first = fleet.start_trainer("first", pause_before_step=0.3 if point else 3.0)
        await eventually(fleet.whole_at, within=START_SECONDS)
        old_term = await _term(fleet)
        late = await (_held(fleet, first, point, arm) if point else _idle(fleet, first))
        paused = Paused(first)

        fleet.start_trainer("second", takeover=True)
        await eventually(lambda: _serves_later_than(fleet, late), within=START_SECONDS)
        term = await _term(fleet)
        assert term > old_term
        assert fleet.ledger.outcome(late) is (Outcome.KEPT if point else Outcome.COMMITTED)

        first.let_go(point)
        paused.go_on()
        await eventually(lambda: first.exits or None, within=180)
        assert first.exits == [ExitCode.FENCED]
        await eventually(lambda: paused.left == [])
        assert _ranks_started(first) == 1

        await _coordinator_refuses(fleet, old_term, term)
        for engine_id in fleet.observers:
            await _engine_refuses(fleet, engine_id, old_term, term)
        await _a_restarted_engine_refuses_too(fleet, old_term, term)

        newest = fleet.ledger.newest
        served = await eventually(lambda: _serves_later_than(fleet, newest), within=180)
        assert await _term(fleet) == term
        claimed = set.union(*(o.claimed for o in fleet.observers.values()))
        assert {fleet.ledger.term(n) for n in claimed if n > late} == {term}
        assert served in claimed
        assert (late in claimed) is not bool(point)
        assert fleet.take_problems() == [f"first ended with {ExitCode.FENCED}, for good"]
        assert (first.starts, first.exits) == (1, [ExitCode.FENCED])
        await eventually(lambda: _accepts(fleet, term))  # else the refusals above would say nothing


# ---- the zombie ----


async def _held(fleet: Fleet, trainer: Daemon, point: str, arm: str) -> int:
    """The number of the push that is held."""
    trainer.arm(point, arm)
    await eventually(lambda: trainer.reached(point), within=180)
    return fleet.ledger.newest


async def _idle(fleet: Fleet, trainer: Daemon) -> int:
    """The number of the push that both ranks just heard the end of: they train now."""
    lines = LogTail(trainer.log)
    heard: list[int] = []

    def both() -> bool:
        heard.extend(line["version"] for line in lines.fresh() if line.get("event") == "pushed")
        return bool(heard) and heard.count(heard[-1]) == 2

    await eventually(both, within=180)
    assert heard[-1] == fleet.ledger.newest
    return heard[-1]


def _ranks_started(trainer: Daemon) -> int:
    return sum(line.get("event") == "ranks_started" for line in LogTail(trainer.log).fresh())


# ---- what it would do, done by hand ----


async def _coordinator_refuses(fleet: Fleet, old_term: int, term: int) -> None:
    stub = fleet_pb2_grpc.FleetStub(fleet.channels["coordinator"])
    request = fleet_pb2.BeginUpdateRequest(
        run_id=RUN,
        model="policy",
        term=old_term,
        request_id="zombie",
        step=1,
        layout_digest=LAYOUT.digest,
        byte_count=LAYOUT.byte_count,
    )
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.BeginUpdate(request, timeout=60)
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    _is_stale(from_rpc_error(error.value), old_term, term)


async def _engine_refuses(fleet: Fleet, engine_id: str, old_term: int, term: int) -> None:
    refusal = await _opened(fleet, engine_id, old_term)
    assert refusal is not None, f"{engine_id} accepted term {old_term}"
    _is_stale(refusal, old_term, term)


async def _a_restarted_engine_refuses_too(fleet: Fleet, old_term: int, term: int) -> None:
    """On the same port, in a new incarnation: first while the coordinator says nothing, then welcomed by it."""
    before = _incarnation(fleet, "e0")
    coordinator = fleet.daemons["coordinator"].pid
    os.kill(coordinator, signal.SIGSTOP)
    try:
        os.kill(fleet.daemons["e0"].pid, signal.SIGKILL)
        await eventually(lambda: _lives_anew(fleet, before), within=180)
        early = [await _opened(fleet, "e0", t) for t in (old_term, term)]
        assert [e.reason if e else "accepted" for e in early] == ["NOT_WELCOMED"] * 2
        assert json.loads((fleet.directory / "e0-state" / "e0.json").read_text())["term"] == term
    finally:
        os.kill(coordinator, signal.SIGCONT)
    refusals: list[WeightplaneError | None] = []

    async def welcomed() -> bool:
        refusals.append(await _opened(fleet, "e0", old_term))
        refusal = refusals[-1]
        return refusal is None or refusal.reason != "NOT_WELCOMED"

    await eventually(welcomed, within=180)
    assert refusals[-1] is not None, f"the restarted engine accepted term {old_term}"
    _is_stale(refusals[-1], old_term, term)
    assert fleet.daemons["e0"].starts == 2


async def _accepts(fleet: Fleet, term: int) -> bool:
    """The same open frame, of the present term. The present trainer's own update may be in its way."""
    refusal = await _opened(fleet, "e0", term)
    assert refusal is None, str(refusal)
    return True


async def _opened(fleet: Fleet, engine_id: str, term: int) -> WeightplaneError | None:
    """Why an agent refuses a new update of this term; None: it accepts it."""
    number = fleet.ledger.newest + 1
    manifest = weight_update_pb2.Manifest(
        layout_digest=LAYOUT.digest, tensor_count=len(LAYOUT.tensors), byte_count=LAYOUT.byte_count
    )
    opened = weight_update_pb2.UpdateOpen(
        run_id=RUN,
        model="policy",
        engine=version_pb2.EngineRef(engine_id=engine_id, incarnation=_incarnation(fleet, engine_id)),
        update_id="zombie",
        writer_term=term,
        version=version_pb2.WeightVersion(term=term, number=number),
        manifest=manifest,
        transport=weight_update_pb2.TRANSPORT_INLINE,
    )
    stream = Stream(fleet.channels[engine_id], opened)
    try:
        await stream.open()
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    finally:
        stream.cut()
    return None


def _is_stale(refusal: WeightplaneError, old_term: int, term: int) -> None:
    """The refusal names both terms."""
    metadata = {"model": "policy", "got": str(old_term), "current": str(term)}
    assert (refusal.reason, refusal.metadata()) == ("STALE_TERM", metadata)


# ---- looking ----


async def _term(fleet: Fleet) -> int:
    view = await fleet.view()
    assert view is not None, "the coordinator does not answer"
    return view.state.models[0].term


async def _serves_later_than(fleet: Fleet, number: int) -> int:
    served = await fleet.whole_at()
    assert served > number, f"the fleet serves {served}"
    return served


def _incarnation(fleet: Fleet, engine_id: str) -> str:
    status = fleet.observers[engine_id].status
    assert status is not None, f"{engine_id} does not answer"
    return status.engine.incarnation


def _lives_anew(fleet: Fleet, before: str) -> bool:
    return _incarnation(fleet, "e0") != before
