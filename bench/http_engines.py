"""What one would write instead of a control plane: engines with HTTP endpoints, and a driver that calls them in turn.

    python -m bench.http_engines FILE COUNT

COUNT engines in this process, each an aiohttp server on a port of its own, their addresses in FILE once all listen.
An engine does the work that an in-memory engine agent does: pause, take the bytes, check their checksum, hold them,
resume, say its version. What the product does beside (leases, fencing, a durable record, a canary, outcomes of each
engine) it does not.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import aiohttp
import xxhash
from aiohttp import web


class Engine:
    """One engine's endpoints, by vLLM's names for its own RL loop."""

    def __init__(self) -> None:
        self._paused, self._open, self._held, self._staged, self._version = False, False, b"", b"", 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        steps: dict[str, Callable[[web.Request], Awaitable[web.Response]]] = {
            "/pause": self.pause,
            "/start_weight_update": self.start,
            "/update_weights": self.update,
            "/finish_weight_update": self.finish,
            "/resume": self.resume,
        }
        app.add_routes([web.post(path, step) for path, step in steps.items()])
        app.add_routes([web.get("/version", self.version)])
        return app

    async def pause(self, request: web.Request) -> web.Response:
        self._paused = True
        return web.json_response({"paused": True})

    async def start(self, request: web.Request) -> web.Response:
        self._open = True
        return web.json_response({"started": (await request.json())["version"]})

    async def update(self, request: web.Request) -> web.Response:
        data = await request.read()
        if not (self._paused and self._open) or xxhash.xxh3_64_hexdigest(data) != request.headers["Checksum"]:
            return web.json_response({"error": "not paused, not started, or other bytes"}, status=409)
        self._staged = data
        return web.json_response({"received": len(data)})

    async def finish(self, request: web.Request) -> web.Response:
        self._held, self._staged, self._open = self._staged, b"", False
        self._version = (await request.json())["version"]
        return web.json_response({"version": self._version})

    async def resume(self, request: web.Request) -> web.Response:
        self._paused = False
        return web.json_response({"paused": False})

    async def version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self._version, "bytes": len(self._held)})


class Driver:
    """A trainer that brings its bytes to every engine. No engine finishes before all have the bytes, and none resumes
    before all hold the new version: so that the fleet serves one version, as the product's barrier does."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def push(self, version: int, data: bytes) -> None:
        """Raises RuntimeError where an engine holds another version in the end."""
        checksum = xxhash.xxh3_64_hexdigest(data)
        await asyncio.gather(*(self._prepare(a, version, data, checksum) for a in self._addresses))
        await asyncio.gather(*(self._post(a, "/finish_weight_update", version) for a in self._addresses))
        held = await asyncio.gather(*(self._resume(a) for a in self._addresses))
        if set(held) != {version}:
            raise RuntimeError(f"engines hold {set(held)} and not {version}")

    async def _prepare(self, address: str, version: int, data: bytes, checksum: str) -> None:
        await self._post(address, "/pause", version)
        await self._post(address, "/start_weight_update", version)
        assert self._session is not None
        url = f"{address}/update_weights"
        async with self._session.post(url, data=data, headers={"Checksum": checksum}) as answer:
            answer.raise_for_status()
            await answer.json()

    async def _resume(self, address: str) -> int:
        await self._post(address, "/resume", 0)
        assert self._session is not None
        async with self._session.get(f"{address}/version") as answer:
            answer.raise_for_status()
            return int((await answer.json())["version"])

    async def _post(self, address: str, path: str, version: int) -> None:
        assert self._session is not None
        async with self._session.post(address + path, json={"version": version}) as answer:
            answer.raise_for_status()
            await answer.json()


async def main(file: Path, count: int) -> None:
    addresses = []
    for _ in range(count):
        runner = web.AppRunner(Engine().app(), access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        addresses.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
    scratch = file.with_suffix(".tmp")
    scratch.write_text("\n".join(addresses))
    scratch.rename(file)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
