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

from controlplane.rpc.channels import open_channel
from controlplane.rpc.logs import configure_logging
from controlplane.rpc.server import RunningServer, start_server
from engine_agent.members.head import Members
from tests.support.every_rpc import served
from tests.support.local_fleet import RUN, local_fleet
from trainer_agent.agent.daemon import TrainerAgent
from trainer_agent.agent.settings import TrainerSettings
from weightplane.local.v1 import member_pb2_grpc

MEMBERS = "weightplane.local.v1.EngineMembers"


async def serve(directory: Path) -> None:
    async with local_fleet(directory, engines=1, channelz=True) as fleet:
        engine = await fleet.engine("e0")
        settings = TrainerSettings(fleet.address, run_id=RUN, address_file=directory / "trainer")
        trainer, members = TrainerAgent(settings, directory / "ranks.sock"), await _members()
        await trainer.start()
        addresses = {
            "coordinator": fleet.address,
            "engine": engine.endpoint,
            "trainer": (directory / "trainer").read_text(),
            "members": members.address,
        }
        ports = {name: [address, await _services(address)] for name, address in addresses.items()}
        told = {"run": RUN, "incarnation": engine.status.engine.incarnation, "ports": ports}
        (directory / "ports.tmp").write_text(json.dumps(told))
        (directory / "ports.tmp").rename(directory / "ports.json")
        await asyncio.to_thread(sys.stdin.read)
        await members.stop()
        await trainer.close()


async def _services(address: str) -> list[str]:
    async with open_channel(address) as channel:
        return sorted(await served(channel))


async def _members() -> RunningServer:
    def register(server: grpc.aio.Server) -> str:
        member_pb2_grpc.add_EngineMembersServicer_to_server(Members(RUN, "e0", 1), server)
        return MEMBERS

    return await start_server("127.0.0.1:0", [register])


if __name__ == "__main__":
    configure_logging("fuzzed", json=True, level="WARNING")
    asyncio.run(serve(Path(sys.argv[1])))
