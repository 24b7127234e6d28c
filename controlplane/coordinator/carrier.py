"""The coordinator as a writer: brings a version to one engine from a checkpoint, under its own term (INV-7).

It names a directory and moves no bytes: the engine agent reads them. One task per engine; what comes of it is told to
the core as `CarryEnded`, and what the engine holds then is the engine's own report's to say (INV-8).
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

import grpc
import structlog
from structlog.contextvars import bind_contextvars

from controlplane import tracing
from controlplane.coordinator.hub import Hub
from controlplane.coordinator.spans import trace_carry
from controlplane.core.errors import DeadlineExceeded, NotWelcomed, PeerLost, UpdateAborted, WeightplaneError
from controlplane.core.fleet_effects import Carry
from controlplane.core.fleet_events import CarryEnded
from controlplane.rpc.channels import open_channel
from controlplane.rpc.codec import engine_ref, version_to_proto
from controlplane.rpc.errors import from_rpc_error
from controlplane.rpc.security import PLAIN, TlsSettings
from controlplane.rpc.security.diagnosis import explained
from weightplane.v1 import fleet_pb2, weight_update_pb2, weight_update_pb2_grpc

log = structlog.get_logger(__name__)

Request = weight_update_pb2.UpdateWeightsRequest
WELCOME_SECONDS = 5.0
"""How long an engine may take to read the welcome that it was sent."""
WELCOME_PAUSE_SECONDS = 0.1

_GO = (fleet_pb2.UPDATE_PHASE_GO, fleet_pb2.UPDATE_PHASE_COMMITTED, fleet_pb2.UPDATE_PHASE_DEGRADED)


class Carrier:
    """All carries of one coordinator's life."""

    def __init__(self, hub: Hub, limit_seconds: float, tls: TlsSettings = PLAIN) -> None:
        """`limit_seconds`: longest that one engine may take to read, check and install."""
        self._hub = hub
        self._tls = tls
        self._limit = limit_seconds
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, carry: Carry) -> None:
        task = asyncio.create_task(self._carry(carry))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End them: an engine that installs goes on by itself, any other keeps what it held."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _carry(self, carry: Carry) -> None:
        engine_id, error, began = carry.engine.engine_id, None, time.monotonic()
        run_id = self._hub.core.settings.run_id
        bind_contextvars(**tracing.log_fields(run_id, carry.update_id))  # of this task alone
        log.info("carry_began", engine=engine_id, version=str(carry.version), checkpoint=carry.checkpoint.name)
        try:
            async with asyncio.timeout(self._limit), open_channel(carry.engine.endpoint, self._tls) as channel:
                await self._bring_welcomed(weight_update_pb2_grpc.WeightUpdateStub(channel), carry)
        except grpc.aio.AioRpcError as broken:
            error = await explained(from_rpc_error(broken), carry.engine.endpoint, self._tls)
        except TimeoutError:
            error = DeadlineExceeded(phase="carry", waited_for=engine_id, waited_seconds=self._limit)
        except WeightplaneError as refused:
            error = refused
        except Exception as broken:  # its end must be told all the same: else nobody would bring this engine anything
            log.exception("carry_broke", engine=engine_id)
            error = PeerLost(peer=engine_id, cause=repr(broken))
        tracing.soon(trace_carry, run_id, carry, began, error)
        failed = {} if error is None else {"reason": error.reason, "text": str(error)}
        log.info("carry_ended", engine=engine_id, version=str(carry.version), **failed)
        await self._hub.handle(CarryEnded(carry.update_id, carry.engine.engine_id, error))

    async def _bring_welcomed(self, stub: Any, carry: Carry) -> None:
        """A carry may be faster than the welcome that its engine is still reading."""
        clock = asyncio.get_running_loop().time
        began = clock()
        while True:
            try:
                return await self._bring(stub, carry)
            except grpc.aio.AioRpcError as broken:
                if clock() - began > WELCOME_SECONDS or not isinstance(from_rpc_error(broken), NotWelcomed):
                    raise
            await asyncio.sleep(WELCOME_PAUSE_SECONDS)

    async def _bring(self, stub: Any, carry: Carry) -> None:
        """Until `applied`; raises what either side of the stream ended with, the engine's word first."""
        call, ready = stub.UpdateWeights(), asyncio.Event()
        hear = asyncio.create_task(_hear(call, carry, ready))
        write = asyncio.create_task(self._write(call, carry, ready))
        try:
            await asyncio.wait({hear, write}, return_when=asyncio.FIRST_COMPLETED)
            if not hear.done():
                write.result()  # raises what broke on our side; nothing else would end the call
            await hear
        finally:
            hear.cancel()
            write.cancel()
            await asyncio.gather(hear, write, return_exceptions=True)
            call.cancel()

    async def _write(self, call: Any, carry: Carry, ready: asyncio.Event) -> None:
        """`open`; once the engine read and checked everything, and the fleet goes, `commit` (INV-3)."""
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the call broke: `hear` has its status
            await call.write(Request(open=self._open(carry)))
            await ready.wait()
            if carry.waits_for_go and not await self._goes(carry):
                abort = weight_update_pb2.Abort(version=version_to_proto(carry.version), reason="given up")
                await call.write(Request(abort=abort))
            else:
                await call.write(Request(commit=_commit(carry)))

    def _open(self, carry: Carry) -> weight_update_pb2.UpdateOpen:
        kept = carry.checkpoint
        manifest = weight_update_pb2.Manifest(
            layout_digest=kept.layout_digest, tensor_count=kept.tensor_count, byte_count=kept.byte_count
        )
        return weight_update_pb2.UpdateOpen(
            run_id=self._hub.core.settings.run_id,
            model=kept.model,
            engine=engine_ref(carry.engine.engine_id, carry.engine.incarnation),
            update_id=carry.update_id,
            writer_term=self._hub.core.term,
            writer=weight_update_pb2.UPDATE_WRITER_COORDINATOR,
            version=version_to_proto(carry.version),
            manifest=manifest,
            transport=weight_update_pb2.TRANSPORT_CHECKPOINT,
            checkpoint=kept.name,
        )

    async def _goes(self, carry: Carry) -> bool:
        """Wait for the fleet's go, and whether it is one."""
        async for state in self._hub.watch_update(self._hub.core.settings.run_id, carry.update_id):
            if state.phase != fleet_pb2.UPDATE_PHASE_PREPARING:
                return state.phase in _GO
        return False


async def _hear(call: Any, carry: Carry, ready: asyncio.Event) -> None:
    """What the engine says, until `applied`. Raises its status, or UpdateAborted where it just ends."""
    async for response in call:
        kind = response.WhichOneof("frame")
        if kind == "ready":
            ready.set()
        elif kind == "applied":
            return
    raise UpdateAborted(update_id=carry.update_id, cause="the engine ended the stream")


def _commit(carry: Carry) -> weight_update_pb2.Commit:
    kept = carry.checkpoint
    return weight_update_pb2.Commit(
        version=version_to_proto(carry.version),
        chunk_count=kept.file_count,
        byte_count=kept.byte_count,
        content_digest=kept.content_digest,
    )
