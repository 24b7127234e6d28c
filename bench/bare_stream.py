"""grpc.aio's own limit: bytes in one stream between two processes, serialized by nobody, read and dropped.

Each end is a process (`python -m bench.bare_stream`). With `kept` their allocators are told what those of the agents
are (`controlplane/allocator.py`); without it they are as anybody finds them, who writes such a stream.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc

from bench.asked import answer_each, asked
from controlplane.allocator import keep_freed_memory
from controlplane.rpc.channels import SERVER_OPTIONS, open_channel

METHOD = "/bench.Bare/Take"
MESSAGE_BYTES = 1 << 20
KEPT = "kept"


@contextmanager
def bare_stream(byte_count: int, *, kept: bool = False) -> Iterator[Callable[[], float]]:
    """A function that sends as many bytes once, in messages of a MiB that exist already. It returns the seconds from
    the first write to the receiver's word that all came, over a channel that was there."""
    told = [KEPT] if kept else []
    with ExitStack() as ends:
        taker = ends.enter_context(asked("-m", __name__, "take", *told))
        yield ends.enter_context(asked("-m", __name__, "send", taker.heard, str(byte_count), *told)).seconds


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
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


def main() -> None:
    """take; or send, to which address, and how many bytes. Then, perhaps, `kept`."""
    end, *words = sys.argv[1:]
    if words[-1:] == [KEPT]:
        keep_freed_memory()
        words.pop()
    if end == "take":
        asyncio.run(_serve())
        return
    address, byte_count = words
    messages = [os.urandom(MESSAGE_BYTES) for _ in range(int(byte_count) // MESSAGE_BYTES)]
    answer_each("ready", lambda: asyncio.run(_send(address, messages)))


if __name__ == "__main__":
    main()
