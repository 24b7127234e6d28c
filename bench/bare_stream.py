"""grpc.aio's own limit: bytes in one stream between two processes, serialized by nobody, read and dropped."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc

from controlplane.rpc.channels import SERVER_OPTIONS, open_channel

METHOD = "/bench.Bare/Take"


async def _take(requests: AsyncIterator[bytes], context: Any) -> bytes:
    taken = 0
    async for data in requests:
        taken += len(data)
    return str(taken).encode()


async def _serve() -> None:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    handler: Any = grpc.stream_unary_rpc_method_handler(_take)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("bench.Bare", {"Take": handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


@contextmanager
def bare_receiver() -> Iterator[str]:
    """A process that takes bytes. Its address."""
    process = subprocess.Popen([sys.executable, "-m", __name__], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield f"127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.terminate()
        process.wait(20)


async def _send(address: str, messages: Sequence[bytes]) -> float:
    async with open_channel(address) as channel:
        await channel.channel_ready()
        started = time.perf_counter()
        call: Any = channel.stream_unary(METHOD)()
        for message in messages:
            await call.write(message)
        await call.done_writing()
        taken = int(await call)
        seconds = time.perf_counter() - started
    if taken != sum(map(len, messages)):
        raise SystemExit(f"{taken} bytes came")
    return seconds


def send(address: str, messages: Sequence[bytes]) -> float:
    """Seconds from the first write to the receiver's word that all came, over a channel that was there."""
    return asyncio.run(_send(address, messages))


if __name__ == "__main__":
    asyncio.run(_serve())
