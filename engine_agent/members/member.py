"""A member: on a further node, the process that keeps an engine's cores there, and its copy of each version.

Promises that its cores live while the stream to the engine's agent does, and not longer: when it breaks they are
killed, and the member comes again, for the engine's next life. It decides nothing: it has no version and no gate.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import structlog
import xxhash

from controlplane.core.errors import WeightplaneError
from controlplane.exit_codes import ExitCode
from controlplane.rpc.channels import open_channel
from controlplane.rpc.errors import from_rpc_error
from controlplane.rpc.security import PLAIN, TlsSettings
from controlplane.rpc.security.diagnosis import explained
from controlplane.rpc.server import wait_for_signal
from engine_agent.lineage import agent_identity
from weightplane.local.v1 import member_pb2 as pb
from weightplane.local.v1 import member_pb2_grpc

log = structlog.get_logger(__name__)

AGAIN_SECONDS = 1.0
"""Between two lives of the engine, or two attempts to reach its agent."""
END_SECONDS = 10.0


@dataclass(frozen=True)
class MemberSettings:
    """How a member runs."""

    engine_id: str
    """The engine that it is a part of."""
    head: str
    """Address of that engine's agent."""
    address: str
    """Address of this node, which the engine's other nodes reach it by."""
    run_id: str = "default"
    """The run that the engine belongs to."""
    model: Path | None = None
    """Directory of the model on this node, where it is another than on the agent's."""
    tls: TlsSettings = PLAIN
    """How it proves that it is the engine's: see docs/security.md."""


class Copy:
    """A version's bytes on this node, in memory, readable by the workers as a file."""

    def __init__(self, byte_count: int) -> None:
        self._descriptor = os.memfd_create("weightplane-member", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, byte_count)
        self._left = byte_count
        self._checksum = xxhash.xxh3_64()

    def write(self, data: bytes) -> None:
        if len(data) > self._left:
            raise OSError(f"{len(data) - self._left} bytes too many")
        view = memoryview(data)
        while view:
            view = view[os.write(self._descriptor, view) :]
        self._left -= len(data)
        self._checksum.update(data)

    def held(self, checksum: bytes) -> pb.Held:
        if self._left or self._checksum.digest() != checksum:
            return pb.Held(problem=f"{self._left} bytes are missing, or what came is not what was sent")
        return pb.Held(path=f"/proc/{os.getpid()}/fd/{self._descriptor}")

    def drop(self) -> None:
        os.close(self._descriptor)


async def run_member(settings: MemberSettings, stop: asyncio.Event | None = None) -> int:
    """Until SIGINT, SIGTERM or `stop`. Returns the exit code."""
    signalled = asyncio.create_task(wait_for_signal(stop or asyncio.Event()))
    channel = open_channel(settings.head, settings.tls)
    try:
        while not signalled.done():
            life = asyncio.create_task(_Life(settings, channel).run())
            await asyncio.wait({life, signalled}, return_when=asyncio.FIRST_COMPLETED)
            if not life.done():
                life.cancel()
            await asyncio.wait({life})
            if not life.cancelled():
                life.result()
            await asyncio.wait({signalled}, timeout=AGAIN_SECONDS)
        return ExitCode.OK
    except WeightplaneError as error:  # it is sent away, and would be again
        log.error("member_refused", reason=error.reason, text=str(error))
        return ExitCode.CONFIG
    finally:
        signalled.cancel()
        await channel.close()


class _Life:
    """With one life of the engine."""

    def __init__(self, settings: MemberSettings, channel: grpc.aio.Channel) -> None:
        self._settings = settings
        self._channel = channel
        self._copy: Copy | None = None
        self._cores: asyncio.subprocess.Process | None = None

    async def run(self) -> None:
        """Until the stream or the cores end. Raises what the agent refused."""
        hello = pb.MemberHello(run_id=self._settings.run_id, engine_id=self._settings.engine_id)
        stub: Any = member_pb2_grpc.EngineMembersStub(self._channel)
        call = stub.Attach(wait_for_ready=True)
        try:
            await call.write(pb.AttachRequest(hello=hello))
            while (frame := await call.read()) is not grpc.aio.EOF:
                answer = await self._obey(frame)
                if answer is not None:
                    await call.write(pb.AttachRequest(held=answer))
            await call.code()
            log.info("member_released")
        except grpc.aio.AioRpcError as error:
            refusal = await explained(from_rpc_error(error), self._settings.head, self._settings.tls)
            if refusal.reason in ("WRONG_RUN", "UNKNOWN_ENGINE", "PERMISSION_DENIED", "IDENTITY_MISMATCH"):
                raise refusal from error
            log.warning("member_stream_ended", reason=refusal.reason, text=str(refusal))
        finally:
            call.cancel()
            await self._end()

    async def _obey(self, frame: pb.AttachResponse) -> pb.Held | None:
        """What it has to answer."""
        match frame.WhichOneof("frame"):
            case "launch":
                await self._launch(frame.launch)
            case "place":
                self._drop()
                self._copy = Copy(frame.place.byte_count)
            case "bytes" if self._copy is not None:
                self._copy.write(frame.bytes.data)
            case "close" if self._copy is not None:
                return self._copy.held(frame.close.checksum)
            case "drop":
                self._drop()
            case other:
                log.error("member_frame_unexpected", frame=other)
        return None

    async def _launch(self, launch: pb.Launch) -> None:
        own = {"node_address": self._settings.address}
        if self._settings.model is not None:
            own["model"] = str(self._settings.model)
        told = {
            "settings": json.loads(launch.settings) | own,
            "address": launch.address,
            "port": launch.port,
            "first_core": launch.first_core,
        }
        self._cores = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "engine_agent.vllm.headless",
            json.dumps(told),
            env=os.environ | agent_identity(),
            start_new_session=True,
        )
        log.info("member_launched", first_core=launch.first_core, pid=self._cores.pid)
        self._watching = asyncio.create_task(self._watch(self._cores, asyncio.current_task()))

    async def _watch(self, cores: asyncio.subprocess.Process, life: asyncio.Task[None] | None) -> None:
        """The stream ends when the cores do: the agent is not left to believe in them."""
        code = await cores.wait()
        log.warning("member_cores_ended", code=code)
        if life is not None:
            life.cancel()

    def _drop(self) -> None:
        if self._copy is not None:
            self._copy.drop()
            self._copy = None

    async def _end(self) -> None:
        """The cores watch this process's headless child; it ends by SIGTERM, else by SIGKILL, and they with it."""
        self._drop()
        cores, self._cores = self._cores, None
        if cores is None or cores.returncode is not None:
            return
        self._watching.cancel()
        cores.terminate()
        try:
            async with asyncio.timeout(END_SECONDS):
                await cores.wait()
        except TimeoutError:
            cores.kill()
            await cores.wait()
