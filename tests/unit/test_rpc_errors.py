"""What a caller makes of a status, whatever came with it."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from controlplane.core import errors as e
from controlplane.rpc.errors import DOMAIN, RemoteError, from_rpc_error, to_status

DETAILS = "grpc-status-details-bin"
STALE = e.StaleVersion(engine_id="e0", applied=2, got=1)


def ended(code: grpc.StatusCode, trailing: bytes, words: str = "words") -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata((DETAILS, trailing)), words)


def trailing(error: e.WeightplaneError) -> bytes:
    [(_, value)] = to_status(error).trailing_metadata
    assert isinstance(value, bytes)
    return value


def test_a_typed_error_comes_over_whole() -> None:
    got = from_rpc_error(ended(grpc.StatusCode.FAILED_PRECONDITION, trailing(STALE), str(STALE)))
    assert isinstance(got, e.StaleVersion)
    assert got.metadata() == STALE.metadata()


def test_a_status_that_met_the_callers_own_deadline_is_the_deadline() -> None:
    got = from_rpc_error(ended(grpc.StatusCode.DEADLINE_EXCEEDED, trailing(STALE)))
    assert isinstance(got, RemoteError)
    assert got.code == "DEADLINE_EXCEEDED"


@pytest.mark.parametrize("junk", [b"", b"\xff\xff", b"\x08\x09\x1a\x02\x0a\x7f"])
def test_details_that_are_none_are_left_out(junk: bytes) -> None:
    got = from_rpc_error(ended(grpc.StatusCode.FAILED_PRECONDITION, junk))
    assert isinstance(got, RemoteError)


def test_a_reason_whose_numbers_are_none_is_no_reason() -> None:
    info = error_details_pb2.ErrorInfo(reason="STALE_TERM", domain=DOMAIN, metadata={"got": "many", "current": "x"})
    detail = any_pb2.Any()
    detail.Pack(info)
    status = status_pb2.Status(code=9, message="words", details=[detail]).SerializeToString()
    assert isinstance(from_rpc_error(ended(grpc.StatusCode.FAILED_PRECONDITION, status)), RemoteError)


async def test_an_error_with_more_words_than_headers_may_hold_is_still_typed() -> None:
    """A status travels in headers, of which gRPC takes 8 KiB: beyond, the caller heard of headers and nothing else."""
    told = e.UpdateFailed("u1", "1.7", "many engines: " + "é" * 50_000, "engine-0 FAILED (INSTALL_FAILED: …); " * 1_000)

    async def fail(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        await context.abort_with_status(to_status(told))
        raise AssertionError("the call is over")

    server = grpc.aio.server()
    method: Any = grpc.unary_unary_rpc_method_handler(fail)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Long", {"Ask": method})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            ask: Any = channel.unary_unary("/test.Long/Ask")
            with pytest.raises(grpc.aio.AioRpcError) as heard:
                await ask(b"", timeout=20)
    finally:
        await server.stop(None)
    got = from_rpc_error(heard.value)
    assert isinstance(got, e.UpdateFailed), got
    assert (got.update_id, got.version) == ("u1", "1.7")
    assert got.cause.startswith("many engines: éé")
    assert got.cause.endswith("characters more)")
