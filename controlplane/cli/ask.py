"""One question to a daemon: a channel whose errors come out typed, and say who did not answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from controlplane.cli.credentials import credentials
from controlplane.cli.ending import CommandFailed
from controlplane.exit_codes import ExitCode
from controlplane.rpc.channels import open_channel
from controlplane.rpc.errors import RemoteError, from_rpc_error
from controlplane.rpc.security.diagnosis import explained
from weightplane.v1 import operator_pb2, operator_pb2_grpc


@asynccontextmanager
async def asking(address: str) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to `address`. Raises CommandFailed when nobody answers there in time, else what the daemon raised."""
    tls = credentials()
    async with open_channel(address, tls) as channel:
        try:
            yield channel
        except grpc.aio.AioRpcError as error:
            typed = await explained(from_rpc_error(error), address, tls)
            if isinstance(typed, RemoteError) and typed.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
                cause = typed.text.rpartition(": ")[2].removesuffix("]")
                raise CommandFailed(ExitCode.UNREACHABLE, f"nobody answers at {address}: {cause}") from error
            raise typed from error


async def get_fleet(address: str, timeout: float) -> operator_pb2.FleetView:
    """All that the coordinator knows, now."""
    async with asking(address) as channel:
        stub = operator_pb2_grpc.OperatorStub(channel)
        answer = await stub.GetFleet(operator_pb2.GetFleetRequest(), timeout=timeout)
    return answer.fleet
