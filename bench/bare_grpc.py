"""The floor under the control plane's cost: the same messages over grpc.aio, and nobody who decides anything.

    python -m bench.bare_grpc FILE COUNT

COUNT servers in this process, each on a port of its own, their addresses in FILE. One update is one stream to each,
with as many messages as the product's: open, accepted, chunk, released, ready, commit, applied; raw bytes, not even
parsed. No session reports, no ledger, no outcome: what is left is what grpc.aio takes.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc

from controlplane.rpc.channels import SERVER_OPTIONS, open_channel

METHOD = "/bench.Bare/Update"
OPEN, COMMIT, SMALL = b"o" * 300, b"c" * 80, b"s" * 40


async def _update(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    answers = ((SMALL,), (SMALL, SMALL), (SMALL,))
    index = 0
    async for _ in requests:
        for answer in answers[index]:
            yield answer
        index += 1
        if index == len(answers):
            return


class Driver:
    """Opens all streams at once; commit frames go when all said ready."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses
        self._channels: list[grpc.aio.Channel] = []

    async def open(self) -> None:
        self._channels = [open_channel(address) for address in self._addresses]

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def push(self, data: bytes) -> None:
        calls: list[Any] = [channel.stream_stream(METHOD)() for channel in self._channels]
        await asyncio.gather(*(self._prepare(call, data) for call in calls))
        await asyncio.gather(*(self._commit(call) for call in calls))

    async def _prepare(self, call: Any, data: bytes) -> None:
        await call.write(OPEN)
        await call.read()
        await call.write(data)
        await call.read()
        await call.read()

    async def _commit(self, call: Any) -> None:
        await call.write(COMMIT)
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass


async def _server() -> tuple[grpc.aio.Server, str]:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    handler: Any = grpc.stream_stream_rpc_method_handler(_update)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Bare", {"Update": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


async def main(file: Path, count: int) -> None:
    servers = [await _server() for _ in range(count)]
    scratch = file.with_suffix(".tmp")
    scratch.write_text("\n".join(address for _, address in servers))
    scratch.rename(file)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await asyncio.gather(*(server.stop(None) for server, _ in servers))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
