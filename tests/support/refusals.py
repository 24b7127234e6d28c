"""Calls that are refused, and streams that are ended by an error. What is answered fails the test."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import grpc

from controlplane.core import errors as e
from controlplane.core.errors import WeightplaneError
from controlplane.rpc.errors import from_rpc_error, to_status
from tests.support.writer import Stream


async def rpc_error_of(call: Awaitable[Any]) -> grpc.aio.AioRpcError:
    """As gRPC has it, with its status."""
    try:
        answer = await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError(f"it was not refused; the answer was {answer}")


async def refusal(call: Awaitable[Any]) -> WeightplaneError:
    return from_rpc_error(await rpc_error_of(call))


async def reason_of(call: Awaitable[Any]) -> str:
    """ErrorInfo reason of the error that it is refused with."""
    return (await refusal(call)).reason


async def ended_by(stream: Stream) -> str:
    """Read until the stream is ended by an error; its reason."""

    async def read_on() -> None:
        while True:
            await stream.read()

    return await reason_of(read_on())


def rpc_error(error: e.WeightplaneError | None = None) -> grpc.aio.AioRpcError:
    """As a client meets it; None: nobody answered."""
    empty = grpc.aio.Metadata()
    if error is None:
        return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, empty, empty, "connection refused")
    status: Any = to_status(error)
    return grpc.aio.AioRpcError(status.code, empty, grpc.aio.Metadata(*status.trailing_metadata), status.details)
