"""Certificates and tokens at real servers: those that are not good, those that are replaced, what each side is told."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog

from controlplane.core import errors as e
from controlplane.core.access import Principal, Role
from controlplane.core.sampling import SamplingSettings
from controlplane.rollout.client import RolloutClient
from controlplane.rpc.addresses import split_address
from controlplane.rpc.channels import HANDSHAKE_OPTION, SERVER_OPTIONS, open_channel
from controlplane.rpc.errors import RemoteError, from_rpc_error
from controlplane.rpc.security import PLAIN, ServerSecurity, TlsSettings
from controlplane.rpc.security.diagnosis import explained
from controlplane.rpc.security.tokens import add_token, new_token
from controlplane.rpc.server import start_server
from tests.support.certificates import people, token_for
from tests.support.local_fleet import RUN, LocalFleet
from weightplane.v1 import (
    fleet_pb2,
    fleet_pb2_grpc,
    operator_pb2,
    operator_pb2_grpc,
)

SECONDS = 60.0
"""Longest of a call that is answered."""


# ---- certificates that are not good, and why ----


@asynccontextmanager
async def _coordinator(directory: Path, tls: TlsSettings, **settings: Any) -> AsyncIterator[LocalFleet]:
    fleet = LocalFleet(directory, lambda node: tls)
    try:
        await fleet.start_coordinator(**settings)
        yield fleet
    finally:
        await fleet.close()


async def _ask(address: str, tls: TlsSettings) -> e.WeightplaneError | None:
    """What GetFleet ends with, explained."""
    async with open_channel(address, tls) as channel:
        try:
            stub: Any = operator_pb2_grpc.OperatorStub(channel)
            await stub.GetFleet(operator_pb2.GetFleetRequest(), timeout=SECONDS)
        except grpc.aio.AioRpcError as error:
            return await explained(from_rpc_error(error), address, tls)
        except e.TlsFailed as error:
            return error
    return None


async def test_each_bad_certificate_is_refused_and_the_caller_is_told_which_and_why(tmp_path: Path) -> None:
    made, others = people(tmp_path / "ours"), people(tmp_path / "theirs")
    good = made("viewer/a")
    foreign = replace(others("viewer/a"), ca=good.ca)
    expired = made.issued(Principal(Role.VIEWER, "old"), days=-1)
    async with _coordinator(tmp_path, made("coordinator")) as fleet:
        assert await _ask(fleet.address, good) is None
        cases = {
            "we have none": replace(good, cert=None, key=None),
            "expired at": expired,
            "is not from an authority in": foreign,
            "its certificate is not from an authority": others("viewer/a"),
            "it speaks TLS and we do not": PLAIN,
            "its certificate is not for that address": replace(good, server_name="elsewhere"),
            "cannot be used|No such file": replace(good, ca=tmp_path / "gone"),
        }
        for told, shown in cases.items():
            error = await _ask(fleet.address, shown)
            assert isinstance(error, e.TlsFailed), (told, error)
            assert any(part in str(error) for part in told.split("|")), (told, str(error))


async def test_a_servers_expired_certificate_is_named(tmp_path: Path) -> None:
    made = people(tmp_path)
    old = made.issued(Principal(Role.COORDINATOR), days=-1, name="old")
    async with _coordinator_without_questions(tmp_path, old) as address:
        error = await _ask(address, made("viewer/a"))
    assert "its certificate has expired" in str(error)


@asynccontextmanager
async def _coordinator_without_questions(directory: Path, tls: TlsSettings) -> AsyncIterator[str]:
    server = await start_server("127.0.0.1:0", [], ServerSecurity(tls))
    try:
        yield server.address
    finally:
        await server.stop()


async def test_a_server_without_tls_is_named(tmp_path: Path) -> None:
    async with _coordinator_without_questions(tmp_path, PLAIN) as address:
        error = await _ask(address, people(tmp_path)("viewer/a"))
    assert "it speaks no TLS, and we do" in str(error)


async def test_nobody_at_the_port_is_not_blamed_on_tls(tmp_path: Path) -> None:
    error = await _ask("127.0.0.1:1", people(tmp_path)("viewer/a"))
    assert error is not None
    assert error.reason == "REMOTE"


async def test_a_token_is_not_sent_in_clear_to_another_host(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(new_token())
    error = await _ask("192.0.2.1:7070", TlsSettings(token=tmp_path / "token"))
    assert isinstance(error, e.TlsFailed)
    assert "only over TLS" in str(error)


@pytest.mark.parametrize("secured", [False, True])
async def test_who_connects_and_says_nothing_is_sent_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secured: bool
) -> None:
    """The option by its effect, with a limit that a test can wait for: gRPC's own is two minutes."""
    short = [option for option in SERVER_OPTIONS if option[0] != HANDSHAKE_OPTION]
    monkeypatch.setattr("controlplane.rpc.server.SERVER_OPTIONS", [*short, (HANDSHAKE_OPTION, 300)])
    async with _coordinator_without_questions(tmp_path, people(tmp_path)("engine") if secured else PLAIN) as address:
        host, port = split_address(address)
        reader, writer = await asyncio.open_connection(host, port)
        async with asyncio.timeout(SECONDS):
            while await reader.read(1000):
                pass
        writer.close()


async def test_a_handshake_that_takes_a_second_is_waited_for(tmp_path: Path) -> None:
    made = people(tmp_path)
    async with (
        _coordinator(tmp_path, made("coordinator")) as fleet,
        _slow_way(fleet.address, seconds=1.0) as address,
    ):
        assert await _ask(address, made("viewer/a")) is None


@asynccontextmanager
async def _slow_way(target: str, seconds: float) -> AsyncIterator[str]:
    """A port in front of `target` that hands nothing on for some time after each connection."""
    ways: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(seconds)
        there, back = await asyncio.open_connection(*split_address(target))
        ways.update({asyncio.create_task(pump(reader, back)), asyncio.create_task(pump(there, writer))})

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for way in ways:
            way.cancel()


# ---- without a restart ----


async def test_certificates_are_read_again_at_the_next_connection_by_both_sides(tmp_path: Path) -> None:
    """A new authority replaces the old one everywhere; no process is started anew."""
    old, new = people(tmp_path / "old"), people(tmp_path / "new")
    server, client = old("coordinator"), old("viewer/a")
    async with _coordinator(tmp_path, server) as fleet, open_channel(fleet.address, client) as channel:
        stub: Any = operator_pb2_grpc.OperatorStub(channel)
        watching = stub.WatchFleet(operator_pb2.WatchFleetRequest())
        await watching.read()
        for mine, theirs in ((server, new("coordinator")), (client, new("viewer/a"))):
            _replace(mine, theirs)
        assert isinstance(await _ask(fleet.address, people(tmp_path / "third")("viewer/a")), e.TlsFailed)
        assert await _ask(fleet.address, new("viewer/a")) is None
        await stub.GetFleet(operator_pb2.GetFleetRequest(), timeout=SECONDS)
        assert not watching.done(), "a stream that stands goes on"
        watching.cancel()


def _replace(mine: TlsSettings, theirs: TlsSettings) -> None:
    for ours, new in ((mine.ca, theirs.ca), (mine.cert, theirs.cert), (mine.key, theirs.key)):
        assert ours is not None
        assert new is not None
        scratch = ours.with_suffix(".scratch")
        scratch.write_bytes(new.read_bytes())
        os.replace(scratch, ours)


async def test_a_token_is_taken_and_refused_without_a_restart(tmp_path: Path) -> None:
    tokens, mine = tmp_path / "tokens.toml", tmp_path / "token"
    token_for(tokens, Role.ENGINE)
    async with _coordinator(tmp_path, TlsSettings(tokens=tokens)) as fleet:
        token = new_token()
        mine.write_text(token)
        assert isinstance(await _ask(fleet.address, TlsSettings(token=mine)), e.Unauthenticated)
        add_token(tokens, Principal(Role.VIEWER, "me"), token)
        assert await _ask(fleet.address, TlsSettings(token=mine)) is None
        tokens.write_text("")
        assert isinstance(await _ask(fleet.address, TlsSettings(token=mine)), e.Unauthenticated)


# ---- what must not be seen ----


async def test_no_log_and_no_error_has_a_token_or_a_key_in_it(tmp_path: Path) -> None:
    made, tokens = people(tmp_path), tmp_path / "tokens.toml"
    (tmp_path / "good").write_text(token_for(tokens, Role.VIEWER))
    (tmp_path / "wrong").write_text(new_token())
    server = replace(made("coordinator"), tokens=tokens)
    assert server.key is not None
    secrets = [(tmp_path / "good").read_text(), (tmp_path / "wrong").read_text(), server.key.read_text()[30:80]]
    with structlog.testing.capture_logs() as logs:
        async with _coordinator(tmp_path, server) as fleet:
            ended = [await _ask(fleet.address, replace(server, token=tmp_path / t)) for t in ("good", "wrong")]
            tokens.write_text("[[token]]\nbroken")
            ended.append(await _ask(fleet.address, replace(server, token=tmp_path / "wrong")))
    seen = repr(logs) + repr(ended) + "".join(str(error) for error in ended)
    assert "call_refused" in seen
    assert not [secret for secret in secrets if secret in seen]


async def test_an_unknown_tokens_client_gives_up_at_once_and_says_why(tmp_path: Path) -> None:
    tokens, mine = tmp_path / "tokens.toml", tmp_path / "token"
    token_for(tokens, Role.ENGINE)
    mine.write_text(new_token())
    async with (
        _coordinator(tmp_path, TlsSettings(tokens=tokens)) as fleet,
        RolloutClient(fleet.address, tls=TlsSettings(token=mine)) as rollouts,
    ):
        with pytest.raises(e.Unauthenticated, match="not known here"):
            await rollouts.generate([1], SamplingSettings(max_tokens=1))


async def test_a_rollout_client_that_tls_keeps_out_says_so_when_its_patience_ends(tmp_path: Path) -> None:
    made, others = people(tmp_path / "ours"), people(tmp_path / "theirs")
    async with (
        _coordinator(tmp_path, made("coordinator")) as fleet,
        RolloutClient(fleet.address, tls=others("rollout/a"), wait_seconds=1.0) as rollouts,
    ):
        with pytest.raises(e.DeadlineExceeded, match="not from an authority"):
            await rollouts.generate([1], SamplingSettings(max_tokens=1))


async def test_where_nothing_is_set_everybody_is_an_admin_on_loopback(tmp_path: Path) -> None:
    async with _coordinator(tmp_path, PLAIN) as fleet, open_channel(fleet.address) as channel:
        stub: Any = fleet_pb2_grpc.FleetStub(channel)
        call = stub.WatchRoutes(fleet_pb2.WatchRoutesRequest(model="policy"))
        assert (await call.read()).run_id == RUN


async def test_a_checkpoint_that_tls_keeps_from_an_engine_is_told_of_by_its_cause(tmp_path: Path) -> None:
    """The coordinator's own call is explained as others' are."""
    made, others = people(tmp_path / "ours"), people(tmp_path / "theirs")
    server = await start_server("127.0.0.1:0", [], ServerSecurity(others("engine/e0")))
    try:
        error = await explained(RemoteError("UNAVAILABLE", "?"), server.address, made("coordinator"))
    finally:
        await server.stop()
    assert "its certificate is not from an authority" in str(error)
