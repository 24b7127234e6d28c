"""Checkpoints of committed versions: written beside training, told to the coordinator, retired when old.

Promises: no push waits for a disk. The segments of a version that is written are mapped before its push is answered,
and its ranks take new ones (INV-12). One is written at a time; a push that comes meanwhile has none. Whatever happens
here, the push that was committed stays what it is; only a fence is everybody's matter. A checkpoint that the
coordinator does not know is removed again. Deleted is only what this trainer wrote, of this run and this model, after
the coordinator was told; never what is newer than the version that it just committed, nor that one.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import structlog

from controlplane.checkpoints import (
    CheckpointManifest,
    CheckpointNotWritten,
    identity,
    old_numbers,
    prefix_of,
    remove,
)
from controlplane.core.errors import (
    CheckpointInUse,
    DeadlineExceeded,
    SegmentUnreadable,
    StaleTerm,
    WeightplaneError,
)
from controlplane.rpc.codec import version_to_proto
from controlplane.rpc.errors import from_rpc_error
from trainer_agent.agent import reasons
from trainer_agent.agent.checkpoint_files import Whole, hold, write
from trainer_agent.agent.frames import SegmentReader
from trainer_agent.agent.session import FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS
from weightplane.v1 import fleet_pb2, fleet_pb2_grpc

log = structlog.get_logger(__name__)

WRITE_SECONDS = 3600.0
"""Longest time that one may take to write; then it is given up, and its memory with it."""
TELL_SECONDS = 60.0
"""How long the coordinator may take to hear of a checkpoint, or of an older one's end: a restart of it fits in."""
RPC_SECONDS = 5.0
STOP_SECONDS = 3.0
"""How long the writing may take to notice that it is to stop. A disk that hangs is left alone with its thread."""
FINISH_SECONDS = 30.0
"""How long the agent's own end waits for the checkpoint that is being written."""
Fenced = Callable[[StaleTerm], None]


class _Coordinator:
    """Whom to tell, and until when."""

    def __init__(self, fleet: fleet_pb2_grpc.FleetAsyncStub, until: float) -> None:
        self._fleet = fleet
        self._until = until

    async def told(self, phase: str, call: Callable[[fleet_pb2_grpc.FleetAsyncStub, float], Awaitable[object]]) -> None:
        """One call, again on what passes. Raises what it was refused with, or DeadlineExceeded."""
        began, pause = _now(), FIRST_BACKOFF_SECONDS
        while True:
            try:
                await call(self._fleet, min(RPC_SECONDS, max(self._until - _now(), 0.1)))
                return
            except grpc.aio.AioRpcError as broken:
                error = from_rpc_error(broken)
            if not reasons.call_passes(error):
                raise error
            if _now() + pause > self._until:
                waited = round(_now() - began, 1)
                raise DeadlineExceeded(phase=phase, waited_for=f"the coordinator ({error})", waited_seconds=waited)
            await asyncio.sleep(pause)
            pause = min(pause * 2, MAX_BACKOFF_SECONDS)


class CheckpointKeeper:
    """The checkpoints of one trainer agent, in one root, over all lives of its ranks."""

    def __init__(self, root: Path, *, every: int, keep: int) -> None:
        self._root = root
        self._every = every
        self._keep = keep
        self._since = every - 1
        """Commits since the last one that was begun. The first commit is kept."""
        self._known: dict[str, tuple[str, str, int] | None] = {}
        """Run, model and number of each directory that was looked at; None: it is no checkpoint."""
        self._untold: set[int] = set()
        """Numbers that are removed, and that the coordinator may still know."""
        self._whole: Whole | None = None
        self._work: asyncio.Task[None] | None = None
        self._thread: asyncio.Task[CheckpointManifest | None] | None = None
        self._stop = threading.Event()

    def due(self) -> bool:
        """Whether the push that begins now is to be kept if it commits: its turn, and nothing is being written."""
        if self._since + 1 < self._every:
            return False
        if self.idle:
            return True
        log.info("checkpoint_skipped", cause="the one before is still being written")
        return False

    @property
    def idle(self) -> bool:
        return all(task is None or task.done() for task in (self._work, self._thread))

    @property
    def name(self) -> str:
        """Of what is being written; empty: nothing is."""
        return "" if self.idle or self._whole is None else self._whole.name

    def committed(self) -> None:
        """Count a committed push."""
        self._since += 1

    def begin(self, whole: Whole, fleet: fleet_pb2_grpc.FleetAsyncStub, fenced: Fenced) -> bool:
        """Write a version that was due, tell of it, retire older ones; all that goes on beside the caller.

        Returns:
            Whether its segments are being read from now on.
        """
        assert self.idle, "it was due"
        try:
            reader = hold(whole)
        except (CheckpointNotWritten, SegmentUnreadable) as error:
            self._failed(whole, "write", str(error))
            return False
        self._since, self._whole = 0, whole
        self._stop = threading.Event()
        self._work = asyncio.create_task(self._kept(whole, reader, fleet, fenced))
        return True

    async def finish(self, seconds: float = FINISH_SECONDS) -> None:
        """Wait for what is being written, then stop it. Nothing half is left under a checkpoint's name."""
        tasks = {task for task in (self._work, self._thread) if task is not None}
        if not tasks:
            return
        await asyncio.wait(tasks, timeout=seconds)
        self._stop.set()
        await asyncio.wait(tasks, timeout=STOP_SECONDS)
        if self._work is not None:
            self._work.cancel()

    async def _kept(
        self, whole: Whole, reader: SegmentReader, fleet: fleet_pb2_grpc.FleetAsyncStub, fenced: Fenced
    ) -> None:
        """Supervises: the fleet serves the version, whatever is wrong with us."""
        try:
            manifest = await self._written(whole, reader)
            coordinator = _Coordinator(fleet, _now() + TELL_SECONDS)
            if manifest is not None and await self._published(whole, manifest, coordinator):
                await self._retire_old(whole, coordinator)
        except StaleTerm as fence:
            fenced(fence)
        except Exception:
            log.exception("checkpoint_broke", name=whole.name)

    # ---- writing ----

    async def _written(self, whole: Whole, reader: SegmentReader) -> CheckpointManifest | None:
        """None: it was not written; the log says why, and nothing is left of it."""
        began = time.monotonic()
        writing = asyncio.create_task(asyncio.to_thread(write, self._root, whole, reader, self._stop))
        writing.add_done_callback(_heard)
        self._thread = writing
        await asyncio.wait({writing}, timeout=WRITE_SECONDS)
        if not writing.done():
            self._stop.set()
            await asyncio.wait({writing}, timeout=STOP_SECONDS)
        seconds = round(time.monotonic() - began, 3)
        if not writing.done():
            self._failed(whole, "write", f"the disk took longer than {seconds} s; its thread is left alone")
            return None
        try:
            manifest = writing.result()
        except (CheckpointNotWritten, SegmentUnreadable, OSError) as error:
            self._failed(whole, "write", str(error))
            return None
        if manifest is None:
            self._failed(whole, "write", f"it was stopped after {seconds} s")
            return None
        byte_count = whole.layout.byte_count
        log.info("checkpoint_written", name=whole.name, version=str(whole.version), bytes=byte_count, seconds=seconds)
        return manifest

    # ---- telling ----

    async def _published(self, whole: Whole, manifest: CheckpointManifest, coordinator: _Coordinator) -> bool:
        request = fleet_pb2.PublishCheckpointRequest(
            run_id=whole.run_id, term=whole.term, checkpoint=_to_proto(whole, manifest)
        )
        try:
            await coordinator.told("publish", lambda fleet, seconds: fleet.PublishCheckpoint(request, timeout=seconds))
        except WeightplaneError as error:
            self._failed(whole, "publish", str(error), error.reason)
            if isinstance(error, DeadlineExceeded):  # it may have been heard, and only the answer was lost
                self._untold.add(whole.version.number)
            await self._removed(whole, whole.name)
            if reasons.fences(error):
                raise
            return False
        self._known[whole.name] = (whole.run_id, whole.model, whole.version.number)
        log.info("checkpoint_published", name=whole.name, version=str(whole.version))
        return True

    # ---- retiring ----

    async def _retire_old(self, whole: Whole, coordinator: _Coordinator) -> None:
        try:
            found = await asyncio.to_thread(self._look, whole)
        except OSError as error:
            self._failed(whole, "look", str(error))
            return
        for number in sorted(old_numbers(found, whole.version.number, self._keep) | self._untold):
            try:
                if not await self._retired(whole, number, coordinator):
                    return  # the next time
            except CheckpointInUse as error:
                log.info("checkpoint_stays", number=number, cause=str(error))
                continue
            for name in sorted(n for n, theirs in found.items() if theirs == number):
                if await self._removed(whole, name):
                    del self._known[name]
                    log.info("checkpoint_retired", name=name)
            self._untold.discard(number)

    async def _retired(self, whole: Whole, number: int, coordinator: _Coordinator) -> bool:
        request = fleet_pb2.RetireCheckpointRequest(
            run_id=whole.run_id, model=whole.model, term=whole.term, number=number
        )
        try:
            await coordinator.told("retire", lambda fleet, seconds: fleet.RetireCheckpoint(request, timeout=seconds))
        except CheckpointInUse:
            raise
        except WeightplaneError as error:
            self._failed(whole, "retire", f"number {number}: {error}", error.reason)
            if reasons.fences(error):
                raise
            return False
        return True

    async def _removed(self, whole: Whole, name: str) -> bool:
        try:
            await asyncio.to_thread(remove, self._root, name)
        except OSError as error:
            self._failed(whole, "remove", f"{name}: {error}")
            return False
        return True

    def _look(self, whole: Whole) -> dict[str, int]:
        """Name and number of each checkpoint in the root that this trainer wrote, in this life or another. Blocks."""
        prefix = prefix_of(whole.run_id, whole.model)
        names = {p.name for p in self._root.iterdir() if p.name.startswith(prefix)}
        self._known = {n: self._known[n] if n in self._known else identity(self._root, n) for n in names}
        ours = ((n, known) for n, known in self._known.items() if known is not None)
        return {n: number for n, (run, model, number) in ours if (run, model) == (whole.run_id, whole.model)}

    def _failed(self, whole: Whole, step: str, cause: str, reason: str = "") -> None:
        log.warning(
            "checkpoint_failed", name=whole.name, version=str(whole.version), step=step, reason=reason, cause=cause
        )


def _to_proto(whole: Whole, manifest: CheckpointManifest) -> fleet_pb2.Checkpoint:
    return fleet_pb2.Checkpoint(
        model=whole.model,
        version=version_to_proto(whole.version),
        name=whole.name,
        layout_digest=manifest.layout.digest,
        content_digest=manifest.content_digest,
        tensor_count=len(manifest.layout.tensors),
        file_count=len(manifest.files),
        byte_count=manifest.layout.byte_count,
    )


def _heard(work: asyncio.Task[CheckpointManifest | None]) -> None:
    """What a thread that was left alone still raises is told here, and by nobody else."""
    if not work.cancelled():
        work.exception()


def _now() -> float:
    return asyncio.get_running_loop().time()
