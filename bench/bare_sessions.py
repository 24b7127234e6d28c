"""The floor under a coordinator's sessions: the same reports over grpc.aio, and nobody who makes anything of them.

    python -m bench.bare_sessions serve FILE
    python -m bench.bare_sessions report ADDRESS COUNT

`serve` has one stream method that reads raw bytes and drops them; `report` opens COUNT streams to it, each over a
connection of its own, and writes as many bytes as a report has, once a second on each.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from controlplane.rpc.channels import SERVER_OPTIONS, open_channel

METHOD = "/bench.Bare/Session"
REPORT = b"r" * 200
SECONDS = 1.0
AT_ONCE = 16


async def _session(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for _ in requests:
        pass
    yield b""


async def serve(file: Path, stop: asyncio.Event) -> None:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    handler: Any = grpc.stream_stream_rpc_method_handler(_session)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Bare", {"Session": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    scratch = file.with_suffix(".tmp")
    scratch.write_text(f"127.0.0.1:{port}")
    scratch.rename(file)
    await stop.wait()
    await server.stop(None)


async def report(address: str, count: int, stop: asyncio.Event) -> None:
    tasks = []
    for i in range(count):
        tasks.append(asyncio.create_task(_reports(address)))
        if i % AT_ONCE == AT_ONCE - 1:
            await asyncio.sleep(0.05)
    await stop.wait()
    for task in tasks:
        task.cancel()


async def _reports(address: str) -> None:
    async with open_channel(address) as channel:
        call: Any = channel.stream_stream(METHOD)()
        while True:
            await call.write(REPORT)
            await asyncio.sleep(SECONDS)


async def main(words: list[str]) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    match words:
        case ["serve", file]:
            await serve(Path(file), stop)
        case ["report", address, count]:
            await report(address, int(count), stop)
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
