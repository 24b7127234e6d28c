"""A whole fleet under mutual TLS, each part as nobody but itself: pushes, catch-up, tokens, people at commands."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from controlplane.core.sampling import SamplingSettings
from controlplane.exit_codes import ExitCode
from controlplane.rollout.client import RolloutClient
from controlplane.rpc.security import TlsSettings
from tests.support.certificates import people
from tests.support.eventually import eventually
from tests.support.local_fleet import RUN, LocalFleet
from tests.support.toy_rank import Script
from tests.support.toy_trainer import start_engine, toy_trainer


async def test_a_secured_fleet_pushes_catches_up_generates_and_answers_people(tmp_path: Path) -> None:
    made, root = people(tmp_path), tmp_path / "checkpoints"
    fleet = LocalFleet(tmp_path, made)

    def engine(name: str) -> None:
        start_engine(fleet, name, tls=made(f"engine/{name}", RUN), checkpoint_root=root)

    try:
        await fleet.start_coordinator()
        engine("e0")
        await fleet.wait_for_engines(1)
        async with toy_trainer(fleet.address, checkpoint_root=root, tls=made("trainer/toy", RUN)) as trainer:
            ranks = await trainer.start_ranks(Script(steps=1), world=1)
            assert await ranks[0].code() == ExitCode.OK
        engine("late")
        await eventually(lambda: _applied(fleet, "late"))
        async with RolloutClient(fleet.address, run_id=RUN, tls=made("rollout/loop", RUN)) as rollouts:
            assert (await rollouts.generate([1, 2, 3], SamplingSettings(max_tokens=3))).tokens
        await _people(fleet, made("viewer/page"))
    finally:
        await fleet.close()


async def _applied(fleet: LocalFleet, engine: str) -> bool:
    statuses = [e.status for e in (await fleet.view()).engines]
    return any(s.engine.engine_id == engine and s.applied.number == 1 for s in statuses)


async def _people(fleet: LocalFleet, viewer: TlsSettings) -> None:
    """A viewer looks, and may not act; a stranger is told why."""
    there = ("--coordinator", fleet.address)
    status, drain, stranger, health = await asyncio.gather(
        _weightplane(viewer, "status", *there),
        _weightplane(viewer, "engines", "drain", "late", *there),
        _weightplane(None, "status", *there),
        _weightplane(viewer, "health", "--addr", fleet.address),
    )
    assert status[0] == ExitCode.OK
    assert "late" in status[1]
    assert drain[0] == ExitCode.DENIED
    assert "it wants admin, the caller has viewer" in drain[1]
    assert stranger[0] == ExitCode.UNREACHABLE
    assert "it speaks TLS and we do not" in stranger[1]
    assert health[0] == ExitCode.OK


async def _weightplane(tls: TlsSettings | None, *words: str) -> tuple[int, str]:
    given = {} if tls is None else {"CA": tls.ca, "CERT": tls.cert, "KEY": tls.key}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "controlplane.cli.main", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=os.environ | {f"WEIGHTPLANE_TLS_{name}": str(path) for name, path in given.items()},
    )
    output, _ = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode is not None
    return process.returncode, output.decode()
