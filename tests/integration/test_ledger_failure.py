"""A ledger that cannot write ends the coordinator: what was told was written, and nothing else was told (INV-9)."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from controlplane.exit_codes import ExitCode
from controlplane.rpc.channels import open_channel
from tests.support import ledger_v1
from tests.support.eventually import eventually
from weightplane.v1 import fleet_pb2, fleet_pb2_grpc

FULL_AT_BYTES = 120_000
"""Largest file that the coordinator may write: some records fit, not many."""
MANY = 200
NO_ROOM_BYTES = 8192
"""No room for the pages that a migration changes."""

CODE = """
import asyncio, resource, sys
from pathlib import Path
from controlplane.coordinator.daemon import CoordinatorSettings, run_coordinator
limit, state, address = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
sys.exit(asyncio.run(run_coordinator(CoordinatorSettings("127.0.0.1:0", state, address_file=address))))
"""


class Coordinator:
    """In a process of its own, whose files may not grow past a limit."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    async def start(self, limit: int) -> str:
        file = self.directory / "address"
        file.unlink(missing_ok=True)
        arguments = [str(limit), str(self.directory / "state"), str(file)]
        self.process = await asyncio.create_subprocess_exec(sys.executable, "-c", CODE, *arguments)
        await eventually(file.exists)
        return file.read_text()

    async def stop(self) -> int:
        self.process.terminate()
        return await asyncio.wait_for(self.process.wait(), 60)


async def take_lease(address: str, number: int) -> int:
    """The term that was told. Raises AioRpcError when none was."""
    hello = fleet_pb2.TrainerHello(
        run_id="default",
        model="policy",
        trainer_id=f"t{number}",
        incarnation=f"i{number}",
        ranks=[fleet_pb2.TrainerRankInfo(rank=0, host_id="h", device_uuid="d")],
        takeover=True,
    )
    async with open_channel(address) as channel:
        call: Any = fleet_pb2_grpc.FleetStub(channel).Session(timeout=60)
        await call.write(fleet_pb2.SessionRequest(trainer_hello=hello))
        frame = await call.read()
        if frame is grpc.aio.EOF:
            raise grpc.aio.AioRpcError(await call.code(), grpc.aio.Metadata(), grpc.aio.Metadata())
        return int(frame.welcome.trainer_term)


async def test_a_full_disk_ends_the_coordinator_and_every_term_that_was_told_is_remembered(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path)
    address = await coordinator.start(FULL_AT_BYTES)
    told = 0

    async def until_it_fails() -> None:
        nonlocal told
        for number in range(MANY):
            told = await take_lease(address, number)

    with pytest.raises(grpc.aio.AioRpcError):
        await until_it_fails()
    assert await asyncio.wait_for(coordinator.process.wait(), 60) == ExitCode.LEDGER
    assert told > 0
    again = await coordinator.start(0)
    assert await take_lease(again, MANY) == told + 1
    assert await coordinator.stop() == ExitCode.OK


async def test_a_migration_on_a_full_disk_leaves_the_older_ledger_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "state" / "ledger.sqlite"
    before = ledger_v1.make(path)
    arguments = [str(NO_ROOM_BYTES), str(path.parent), str(tmp_path / "address")]
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", CODE, *arguments)
    assert await asyncio.wait_for(process.wait(), 60) == ExitCode.LEDGER
    assert not (tmp_path / "address").exists()
    assert (ledger_v1.version(path), ledger_v1.rows(path)) == (1, before)
