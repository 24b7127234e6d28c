"""What one would write with Ray instead: an actor for each engine, and a driver that puts the bytes and calls them.

An actor is a process, as an engine is; it does the work that an in-memory engine agent does. The bytes go through the
object store once; each phase is a fan-out that is waited for, as in `bench.http_engines`.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import psutil
import xxhash

SMALL = {"num_cpus": 0, "memory": 0, "max_concurrency": 1}
STORE_BYTES = 128 << 20


class Engine:
    """The same steps as over HTTP."""

    def __init__(self) -> None:
        self._paused, self._open, self._held, self._staged, self._version = False, False, b"", b"", 0

    def pause(self) -> bool:
        self._paused = True
        return True

    def start(self, version: int) -> int:
        self._open = True
        return version

    def update(self, data: bytes, checksum: str) -> int:
        if not (self._paused and self._open) or xxhash.xxh3_64_hexdigest(data) != checksum:
            raise ValueError("not paused, not started, or other bytes")
        self._staged = data
        return len(data)

    def finish(self, version: int) -> int:
        self._held, self._staged, self._open, self._version = self._staged, b"", False, version
        return version

    def resume(self) -> bool:
        self._paused = False
        return True

    def version(self) -> int:
        return self._version


def start() -> None:
    """A Ray of its own, also where another one runs on this machine."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        object_store_memory=STORE_BYTES,
        logging_level=logging.ERROR,
        configure_logging=False,
        log_to_driver=False,
    )


def pids() -> list[int]:
    """Ray's own processes and the actors, which are their children."""
    names = ("gcs_server", "raylet")
    return [p.pid for p in psutil.Process().children(recursive=True) if p.name().startswith(names)]


def stop() -> None:
    import ray

    ray.shutdown()


class Driver:
    """Of `engines` actors."""

    def __init__(self, engines: int) -> None:
        import ray

        self._ray: Any = ray
        actor = self._ray.remote(**SMALL)(Engine)
        self._actors = [actor.remote() for _ in range(engines)]
        ray.get([a.version.remote() for a in self._actors], timeout=300)

    def push(self, version: int, data: bytes) -> None:
        """Calls of one actor run in order, so each phase needs one wait. Raises RuntimeError."""
        ray, checksum = self._ray, xxhash.xxh3_64_hexdigest(data)
        held = ray.put(data)
        for actor in self._actors:
            actor.pause.remote()
            actor.start.remote(version)
        ray.get([a.update.remote(held, checksum) for a in self._actors])
        ray.get([a.finish.remote(version) for a in self._actors])
        for actor in self._actors:
            actor.resume.remote()
        if set(ray.get([a.version.remote() for a in self._actors])) != {version}:
            raise RuntimeError("some actor holds another version")

    def close(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
