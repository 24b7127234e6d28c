"""A TCP link that is slow and late: `python -m tests.support.slow_link LISTEN TARGET LATENCY_SECONDS BYTES_PER_SECOND`.

Every byte goes through in order, after the latency, at most so many a second; 0: as fast as it comes.
"""

from __future__ import annotations

import asyncio
import sys

PIECE_BYTES = 16 << 10


async def main() -> None:
    listen, target, latency, rate = sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])
    host, _, port = listen.rpartition(":")
    there, _, there_port = target.rpartition(":")

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(there, int(there_port))
        except OSError:
            writer.close()
            return
        await asyncio.gather(
            carry(reader, far_writer, latency, rate), carry(far_reader, writer, latency, rate), return_exceptions=True
        )

    server = await asyncio.start_server(connected, host, int(port))
    print("listening", flush=True)
    await server.serve_forever()


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, latency: float, rate: float) -> None:
    """One direction. What is on its way is bounded by the rate and the latency."""
    loop = asyncio.get_running_loop()
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(1024)

    async def deliver() -> None:
        while True:
            due, data = await under_way.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            if not data:
                writer.close()
                return
            writer.write(data)
            await writer.drain()

    delivering = asyncio.create_task(deliver())
    try:
        while data := await reader.read(PIECE_BYTES):
            await under_way.put((loop.time() + latency, data))
            if rate:
                await asyncio.sleep(len(data) / rate)
        await under_way.put((loop.time() + latency, b""))
        await delivering
    finally:
        delivering.cancel()
        writer.close()


if __name__ == "__main__":
    asyncio.run(main())
