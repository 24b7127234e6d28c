"""Every RPC of every daemon, by every role, by nobody, by somebody of another run: generated over the descriptors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from controlplane.core import errors as e
from controlplane.core.access import POLICY, Role
from controlplane.rpc.channels import open_channel
from controlplane.rpc.errors import RemoteError
from controlplane.rpc.security import ServerSecurity, TlsSettings, authority
from controlplane.rpc.security.tokens import new_token
from controlplane.rpc.server import RunningServer, start_server
from engine_agent.members.head import Members
from tests.support.certificates import People, people, token_for
from tests.support.every_rpc import Rpc, every_rpc, served
from tests.support.local_fleet import RUN, LocalFleet
from trainer_agent.agent.daemon import TrainerAgent
from trainer_agent.agent.settings import TrainerSettings
from weightplane.local.v1 import member_pb2_grpc

OPEN_STREAM_SECONDS = 0.5
"""Longest that a stream which is let in is looked at."""
REFUSAL_SECONDS = 60.0
"""Longest that a refusal is waited for."""
MEMBERS = "weightplane.local.v1.EngineMembers"
TOLD = (e.Unauthenticated, e.PermissionDenied)


@dataclass(frozen=True)
class Port:
    """A server of one of the daemons, and what it serves by its own word."""

    name: str
    address: str
    services: set[str]

    def rpcs(self) -> list[Rpc]:
        return list(every_rpc(self.services))


async def _port(name: str, address: str, tls: TlsSettings) -> Port:
    async with open_channel(address, tls) as channel:
        return Port(name, address, await served(channel))


@asynccontextmanager
async def every_port(directory: Path, tls: TlsSettings) -> AsyncIterator[list[Port]]:
    """A server of each daemon, secured alike."""
    fleet = LocalFleet(directory, lambda node: tls)
    trainer_address = directory / "trainer-address"
    try:
        await fleet.start_coordinator(channelz=True)
        fleet.start_engine("e0")
        await fleet.wait_for_engines(1)
        engine = (await fleet.engine("e0")).endpoint
        trainer = TrainerAgent(
            TrainerSettings(coordinator=fleet.address, run_id=RUN, address_file=trainer_address, tls=tls),
            directory / "ranks.sock",
        )
        await trainer.start()
        members = await _members(tls)
        try:
            yield [
                await _port("coordinator", fleet.address, tls),
                await _port("engine", engine, tls),
                await _port("trainer", trainer_address.read_text(), tls),
                await _port("members", members.address, tls),
            ]
        finally:
            await members.stop()
            await trainer.close()
    finally:
        await fleet.close()


async def _members(tls: TlsSettings) -> RunningServer:
    def register(server: grpc.aio.Server) -> str:
        member_pb2_grpc.add_EngineMembersServicer_to_server(Members(RUN, "e0", 1), server)
        return MEMBERS

    return await start_server("127.0.0.1:0", [register], ServerSecurity(tls, run_id=RUN))


async def _each(port: Port, tls: TlsSettings, rpcs: list[Rpc]) -> dict[str, e.WeightplaneError | None]:
    async with open_channel(port.address, tls) as channel:
        ended = await asyncio.gather(*(rpc.call(channel, [], REFUSAL_SECONDS) for rpc in rpcs))
    return {rpc.path: end for rpc, end in zip(rpcs, ended, strict=True)}


async def test_what_is_called_here_is_every_rpc_of_every_service_that_there_is(tmp_path: Path) -> None:
    async with every_port(tmp_path, people(tmp_path)("admin/all", RUN)) as ports:
        assert {rpc.path for port in ports for rpc in port.rpcs()} == set(POLICY)
        coordinator = next(port.services for port in ports if port.name == "coordinator")
        assert {"weightplane.v1.Rollout", "grpc.channelz.v1.Channelz"} <= coordinator  # its proxy, and what admins see


async def test_every_rpc_of_every_server_refuses_every_role_that_the_table_leaves_out(tmp_path: Path) -> None:
    made, refused = people(tmp_path), 0
    async with every_port(tmp_path, made("admin/all", RUN)) as ports:
        for port in ports:
            for role in set(Role) - {Role.ADMIN}:
                rpcs = [rpc for rpc in port.rpcs() if role not in POLICY[rpc.path]]
                for path, error in (await _each(port, made(role.value), rpcs)).items():
                    assert isinstance(error, e.PermissionDenied), (port.name, role, path, error)
                    assert error.metadata()["had"] == role.value
                    assert all(wanted.value in error.wanted for wanted in POLICY[path])
                    refused += 1
    assert refused > 80


async def test_every_rpc_of_every_server_refuses_a_certificate_that_names_nobody(tmp_path: Path) -> None:
    made = people(tmp_path)
    nobody = _without_identity(made)
    async with every_port(tmp_path, made("admin/all", RUN)) as ports:
        for port in ports:
            for path, error in (await _each(port, nobody, port.rpcs())).items():
                assert isinstance(error, e.Unauthenticated), (port.name, path, error)


async def test_every_rpc_of_every_server_refuses_a_caller_of_another_run(tmp_path: Path) -> None:
    made = people(tmp_path)
    async with every_port(tmp_path, made("admin/all", RUN)) as ports:
        for port in ports:
            for path, error in (await _each(port, made("admin/all", "another-run"), port.rpcs())).items():
                assert isinstance(error, e.PermissionDenied), (port.name, path, error)
                assert error.metadata()["wanted"] == f"the run {RUN}"


async def test_every_rpc_lets_in_every_role_that_the_table_names(tmp_path: Path) -> None:
    made = people(tmp_path)
    async with every_port(tmp_path, made("admin/all", RUN)) as ports:
        for port in ports:
            for role, ended in zip(Role, await asyncio.gather(*(_let_in(port, made, r) for r in Role)), strict=True):
                assert not [end for end in ended if isinstance(end, TOLD)], (port.name, role)
                untyped = [end for end in ended if isinstance(end, RemoteError) and end.code in ("INTERNAL", "UNKNOWN")]
                assert not untyped, (port.name, role)


async def _let_in(port: Port, made: People, role: Role) -> list[e.WeightplaneError | None]:
    rpcs = [rpc for rpc in port.rpcs() if role in POLICY[rpc.path]]
    async with open_channel(port.address, made(role.value)) as channel:
        return await asyncio.gather(*(rpc.call(channel, [], OPEN_STREAM_SECONDS) for rpc in rpcs))


async def test_with_tokens_every_rpc_of_every_server_refuses_who_shows_none_or_a_wrong_one(tmp_path: Path) -> None:
    made, tokens = people(tmp_path), tmp_path / "tokens.toml"
    (tmp_path / "token").write_text(token_for(tokens, Role.ADMIN))
    (tmp_path / "wrong").write_text(new_token())
    server = replace(made("coordinator"), tokens=tokens, token=tmp_path / "token")
    async with every_port(tmp_path, server) as ports:
        for port in ports:
            for shown in (replace(server, token=None), replace(server, token=tmp_path / "wrong")):
                for path, error in (await _each(port, shown, port.rpcs())).items():
                    assert isinstance(error, e.Unauthenticated), (port.name, path, error)


def _without_identity(made: People) -> TlsSettings:
    """A certificate of our authority, for a web server say."""
    key = ec.generate_private_key(ec.SECP256R1())
    builder = authority._builder(authority._name("web"), made.authority.cert.subject, key, 1)
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.UniformResourceIdentifier("spiffe://x/y")])
    cert = builder.add_extension(names, critical=False).sign(made.authority.key, hashes.SHA256())
    (made.directory / "web.pem").write_bytes(authority._pem(cert))
    (made.directory / "web.key").write_bytes(authority._key_pem(key))
    return TlsSettings(made.directory / "ca.pem", made.directory / "web.pem", made.directory / "web.key")
