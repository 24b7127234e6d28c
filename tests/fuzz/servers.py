"""The servers that are sent to, in a process of their own: `python -m tests.fuzz.servers DIRECTORY`.

A coordinator, an engine agent with an in-memory engine, a trainer agent and an engine's members, each as it is served
in production. Writes their addresses to DIRECTORY/ports.json, and ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import grpc

from controlplane.rpc.logs import configure_logging
from controlplane.rpc.server import RunningServer, start_server
from engine_agent.members.head import Members
from tests.support.local_fleet import RUN, local_fleet
from trainer_agent.agent.daemon import TrainerAgent
from trainer_agent.agent.settings import TrainerSettings
from weightplane.local.v1 import member_pb2_grpc

MEMBERS = "weightplane.local.v1.EngineMembers"


async def serve(directory: Path) -> None:
    async with local_fleet(directory, engines=1) as fleet:
        engine = await fleet.engine("e0")
        settings = TrainerSettings(fleet.address, run_id=RUN, address_file=directory / "trainer")
        trainer, members = TrainerAgent(settings, directory / "ranks.sock"), await _members()
        await trainer.start()
        ports = {
            "coordinator": [fleet.address, ["weightplane.v1.Fleet", "weightplane.v1.Operator"]],
            "engine": [engine.endpoint, [f"weightplane.v1.{s}" for s in ("WeightUpdate", "Rollout", "Lifecycle")]],
            "trainer": [(directory / "trainer").read_text(), ["weightplane.v1.Lifecycle"]],
            "members": [members.address, [MEMBERS]],
        }
        told = {"run": RUN, "incarnation": engine.status.engine.incarnation, "ports": ports}
        (directory / "ports.tmp").write_text(json.dumps(told))
        (directory / "ports.tmp").rename(directory / "ports.json")
        await asyncio.to_thread(sys.stdin.read)
        await members.stop()
        await trainer.close()


async def _members() -> RunningServer:
    def register(server: grpc.aio.Server) -> str:
        member_pb2_grpc.add_EngineMembersServicer_to_server(Members(RUN, "e0", 1), server)
        return MEMBERS

    return await start_server("127.0.0.1:0", [register])


if __name__ == "__main__":
    configure_logging("fuzzed", json=True, level="WARNING")
    asyncio.run(serve(Path(sys.argv[1])))
