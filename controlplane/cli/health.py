"""`weightplane health`: the standard gRPC health check, for probes and scripts."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from controlplane.cli.ending import reported
from controlplane.cli.options import DEFAULT_COORDINATOR, DEFAULT_SECONDS, Timeout, address
from controlplane.exit_codes import ExitCode


@reported
def health(
    addr: Annotated[
        str, typer.Option("--addr", metavar="HOST:PORT", help="Whom to ask.", callback=address)
    ] = DEFAULT_COORDINATOR,
    service: Annotated[
        str, typer.Option("--service", metavar="NAME", help="One service, such as weightplane.v1.Rollout.")
    ] = "",
    alive: Annotated[
        bool, typer.Option("--alive", help="Whether it answers at all, whatever it says: for liveness and startup.")
    ] = False,
    timeout: Timeout = DEFAULT_SECONDS,
) -> int:
    """Ask a coordinator or an agent whether it serves. Ends with 0 only if it says so."""
    return asyncio.run(_alive(addr, service, timeout) if alive else _health(addr, service, timeout))


async def _alive(addr: str, service: str, timeout: float) -> int:
    """Any answer counts, a refusal too: to start a daemon anew gives it no other certificate."""
    from controlplane.core.errors import WeightplaneError

    try:
        await _health(addr, service, timeout)
    except WeightplaneError as error:
        typer.echo(f"{error.reason}: {error}")
    return ExitCode.OK


async def _health(addr: str, service: str, timeout: float) -> int:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from controlplane.cli.ask import asking

    async with asking(addr) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # its type stubs leave the calls out
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout)
    word = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    typer.echo(word)
    return ExitCode.OK if word == "SERVING" else ExitCode.FAILED
