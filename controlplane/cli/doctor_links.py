"""`weightplane doctor --link`: whether bytes come through by each transport, tried where it is called.

Run in the trainer's own environment. The near end is a rank's own code, the far end an engine agent's, in another
process of this host; engines themselves are asked over gRPC for their status. A few megabytes go each way; nothing is
installed, no update begins, and what was made is gone afterwards. Every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import xxhash

from controlplane.cli.doctor_checks import Check, Verdict
from controlplane.core.errors import WeightplaneError, some
from controlplane.devices import host_id
from controlplane.rpc.addresses import is_loopback, split_address
from controlplane.rpc.channels import open_channel
from controlplane.rpc.errors import from_rpc_error
from controlplane.rpc.security import TlsSettings
from controlplane.software import installed
from weightplane.v1 import lifecycle_pb2, lifecycle_pb2_grpc, operator_pb2

PROBE_BYTES = 1 << 20
FAR_SECONDS = 90.0
"""For the other process: on a busy host torch alone takes ten seconds to import."""
POLL_SECONDS = 0.01
AT_ONCE = 32
SAME_SHM = "give trainer and engine one /dev/shm: --ipc=host, or one pod with an emptyDir of medium Memory"


class ProbeFailed(Exception):
    """The far end did not get the bytes, or did not answer."""


def of_links(link_host: str, checkpoint_root: Path | None, told: Callable[[str], None]) -> list[Check]:
    """All that can be tried without an engine. `told` hears what is tried."""
    torch = bool(installed("torch"))
    tries: dict[str, Callable[[], Check]] = {
        "shared_memory": shared_memory,
        "broadcast": lambda: broadcast(link_host) if torch else _without_torch("broadcast"),
        "cuda_ipc": lambda: cuda_ipc() if torch else _without_torch("cuda_ipc"),
    }
    if checkpoint_root is not None:
        tries["checkpoint"] = lambda: checkpoint(checkpoint_root)
    found = []
    for name, try_it in tries.items():
        told(name)
        found.append(try_it())
    return found


def shared_memory() -> Check:
    """A rank's segment, read by another process."""
    from trainer_agent.segments import SegmentNames, create

    data, name = os.urandom(PROBE_BYTES), "link shared_memory"
    try:
        segment = create(SegmentNames("doctor", 0).next(), PROBE_BYTES)
    except (WeightplaneError, OSError) as error:
        return Check(name, Verdict.BAD, str(error), "give /dev/shm more room: --shm-size=16g, or --ipc=host")
    try:
        segment.memory[:PROBE_BYTES] = data
        asked = {"segment": segment.name, "host_id": host_id(), "byte_count": PROBE_BYTES}
        with _far_end("shared_memory", asked | {"checksum": xxhash.xxh3_64_hexdigest(data)}) as far:
            _answer(far)
    except ProbeFailed as error:
        return Check(name, Verdict.BAD, str(error), SAME_SHM)
    finally:
        segment.unlink()
    return Check(name, Verdict.GOOD, "another process of this host read what was written")


def broadcast(link_host: str) -> Check:
    """A link of a rank and one other: meet, connect, compare the probe."""
    from controlplane.core.errors import LinkFailed
    from trainer_agent.rank.links import LinkKey, SenderLink
    from weightplane.v1 import weight_update_pb2

    name, host = "link broadcast", link_host or "127.0.0.1"
    key = LinkKey("doctor", (("doctor", "0"),), weight_update_pb2.LINK_FATE_SHARED, host)
    advice = f"link_host is an address of this host that engines reach, with its ports open; it is {host} here"
    try:
        link = SenderLink(key)
    except LinkFailed as error:
        return Check(name, Verdict.BAD, str(error), advice)
    try:
        with _far_end("broadcast", {"link_id": link.link_id, "rendezvous": link.rendezvous}) as far:
            while not link.met():
                if far.poll() is not None:
                    break
                time.sleep(POLL_SECONDS)
            else:
                link.connect(lambda: None)
            _answer(far)
    except (LinkFailed, ProbeFailed) as error:
        return Check(name, Verdict.BAD, str(error), advice)
    finally:
        link.close()
    if not link_host:
        advice = "set the trainer's link_host, if engines on other hosts are to get broadcasts"
        return Check(name, Verdict.NOTE, "it works over loopback; link_host is not set, so there are none", advice)
    return Check(name, Verdict.GOOD, f"another process joined it at {link.rendezvous} and compared the probe")


def cuda_ipc() -> Check:
    """Device memory, opened by another process."""
    import torch

    name = "link cuda_ipc"
    if not torch.cuda.is_available():
        return Check(name, Verdict.NOTE, f"torch {torch.__version__} sees no CUDA device here: it is not possible")
    from controlplane.device_memory.port import DeviceMemoryError
    from trainer_agent.rank.cuda_ipc import DeviceRing, devices
    from trainer_agent.rank.devices import current_device

    advice = "one IPC namespace for both (--ipc=host)"
    uuid = current_device()
    try:
        ring = DeviceRing(devices, PROBE_BYTES, uuid)
        with _far_end("cuda_ipc", {"probe": ring.probe.told()}) as far:
            _answer(far)
    except (DeviceMemoryError, ProbeFailed) as error:
        return Check(name, Verdict.BAD, str(error), advice)
    return Check(name, Verdict.GOOD, f"another process read device memory of {uuid}")


def checkpoint(root: Path) -> Check:
    """Whether this user can keep files there."""
    name, probe = "link checkpoint", root / f".doctor-{os.getpid()}"
    if not root.exists():
        return Check(name, Verdict.NOTE, f"{root} is not there yet: the trainer agent makes it")
    try:
        data = os.urandom(PROBE_BYTES)
        probe.write_bytes(data)
        same = probe.read_bytes() == data
    except OSError as error:
        advice = "checkpoint_root is a directory that trainer and engines see; the trainer's user writes there"
        return Check(name, Verdict.BAD, f"{root}: {error.strerror or error}", advice)
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
    if not same:
        return Check(name, Verdict.BAD, f"{root}: other bytes were read than written", "do not keep checkpoints there")
    return Check(name, Verdict.GOOD, f"{root} keeps what is written")


async def of_engines(view: operator_pb2.FleetView, tls: TlsSettings, timeout: float) -> list[Check]:
    """The way that is left where no other works, to each engine that is heard; and who of them shares memory."""
    heard = [e for e in view.engines if e.known]
    if not heard:
        return [Check("link inline", Verdict.NOTE, "no engine is heard: nobody was asked")]
    turns = asyncio.Semaphore(AT_ONCE)
    answers = await asyncio.gather(*(_asked(view.run_id, e, tls, timeout, turns) for e in heard))
    return [inline(dict(zip((e.status.engine.engine_id for e in heard), answers, strict=True))), *sharing(heard)]


def inline(answers: dict[str, float | str]) -> Check:
    """`answers`: each engine's seconds, or what went wrong."""
    wrong = [f"{name}: {answer}" for name, answer in answers.items() if isinstance(answer, str)]
    if wrong:
        advice = "an engine is called at its `advertise`, with the trainer's own certificate or token: give --config"
        return Check("link inline", Verdict.BAD, some(wrong, "; "), advice)
    took = statistics.median(s for s in answers.values() if not isinstance(s, str))
    return Check("link inline", Verdict.GOOD, f"{len(answers)} engines answer, the median after {took * 1000:.0f} ms")


def sharing(heard: list[operator_pb2.EngineView]) -> Iterator[Check]:
    """Engines at an address of this host that see another /dev/shm: a container's wall, most often."""
    here = host_id()
    shared = [e for e in heard if e.host_id == here]
    apart = [e.status.engine.engine_id for e in heard if e.host_id != here and _is_here(e.endpoint)]
    name = "shared memory of engines"
    if apart:
        found = f"{some(apart)}: at an address of this host, and with another /dev/shm"
        yield Check(name, Verdict.NOTE, f"{found}: bytes go there by a slower way", SAME_SHM)
    else:
        yield Check(name, Verdict.GOOD, f"{len(shared)} of {len(heard)} engines share this /dev/shm")


async def _asked(
    run_id: str, engine: operator_pb2.EngineView, tls: TlsSettings, timeout: float, turns: asyncio.Semaphore
) -> float | str:
    import grpc

    from controlplane.rpc.security.diagnosis import explained

    request = lifecycle_pb2.GetStatusRequest(run_id=run_id)
    async with turns, open_channel(engine.endpoint, tls) as channel:
        began = time.monotonic()
        try:
            await lifecycle_pb2_grpc.LifecycleStub(channel).GetStatus(request, timeout=timeout)
        except grpc.aio.AioRpcError as error:
            return str(await explained(from_rpc_error(error), engine.endpoint, tls))
        except WeightplaneError as error:
            return str(error)
        return time.monotonic() - began


def _is_here(endpoint: str) -> bool:
    try:
        return is_loopback(split_address(endpoint)[0])
    except ValueError:
        return False


@contextmanager
def _far_end(transport: str, asked: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """It is gone when the block ends."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "controlplane.cli.link_far_end"]
    far = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
    try:
        assert far.stdin is not None
        far.stdin.write(json.dumps({"transport": transport, **asked}) + "\n")
        far.stdin.flush()
        yield far
    finally:
        far.kill()
        far.communicate()


def _answer(far: subprocess.Popen[str]) -> None:
    """Raises ProbeFailed."""
    try:
        said, _ = far.communicate(timeout=FAR_SECONDS)
        problem = str(json.loads(said.splitlines()[-1])["problem"])
    except subprocess.TimeoutExpired as error:
        raise ProbeFailed(f"the other process did not answer within {FAR_SECONDS:.0f} s") from error
    except (IndexError, ValueError, KeyError) as error:
        raise ProbeFailed(f"the other process ended with code {far.returncode}, without an answer") from error
    if problem:
        raise ProbeFailed(problem)


def _without_torch(transport: str) -> Check:
    advice = "run it in the trainer's own environment: pip install 'weightplane[trainer]'"
    return Check(f"link {transport}", Verdict.NOTE, "torch is not installed here: it was not tried", advice)
