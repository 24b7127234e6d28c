"""A TCP relay in a process of its own: stopped by a signal, it is a network that carries nothing any more.

    python -m bench.relay TARGET FILE

FILE gets the address that it listens on.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from pathlib import Path

PIECE_BYTES = 1 << 16


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await reader.read(PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
    writer.close()


async def main(target: str, file: Path) -> None:
    host, _, port = target.rpartition(":")

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(_carry(reader, far_writer), _carry(far_reader, writer))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    scratch = file.with_suffix(".tmp")
    scratch.write_text(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    scratch.rename(file)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
