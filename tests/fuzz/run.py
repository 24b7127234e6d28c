"""Send frames to every RPC of every server, and judge: `python -m tests.fuzz.run [--frames 20000] [--seed 1]`.

Each call must end with a status of the contract: well, or with a reason of ours, or with gRPC's own word for a message
that is too long, or at the caller's own deadline where a stream was let in. INTERNAL, UNKNOWN, UNAVAILABLE, a process
that ends, or memory that grows is a failure, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from controlplane.core.errors import WeightplaneError
from controlplane.rpc.channels import CHANNEL_OPTIONS
from controlplane.rpc.errors import LOST_STATUS, RemoteError
from tests.fuzz.messages import Texts, calls, oversized
from tests.support.eventually import eventually
from tests.support.every_rpc import Rpc, every_rpc

FRAMES = 20_000
OPEN_STREAM = "let in: a stream that is open still"
TRIES = 10
BATCH, BATCHES = 16, 12
"""Calls that are drawn together, and how many such are on their way at once."""
STREAM_SECONDS = 1.0
"""How long a stream of answers that was let in is looked at."""
CALL_SECONDS = 10.0
"""Longest that any other call may take, unless it asked to wait."""
MAX_GROWTH_BYTES = 32 << 20
"""Of the servers' memory, after the first fifth of the frames: more is a leak."""
WARM_SHARE = 0.2
UNTIMELY = "/weightplane.v1.Lifecycle/Shutdown"
"""It would end the engine, as it should: it is not told the engine's present life."""
WORDS_OF_OTHERS = ("NOT_FOUND", "INVALID_ARGUMENT")
"""What health, reflection and channelz, which are not ours, say of names and numbers that they do not know."""
LEFT_TO_GRPC = ("RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "CANCELLED", "UNIMPLEMENTED")


@dataclass
class Report:
    """What was sent, and what came back."""

    frames: int = 0
    frame_bytes: int = 0
    calls: int = 0
    sent_to: set[str] = field(default_factory=set)
    """Paths of RPCs."""
    answers: Counter[str] = field(default_factory=Counter)
    """By reason, or gRPC's code."""
    wrong: list[str] = field(default_factory=list)
    """Answers that no call may have."""
    warm_bytes: int = 0
    end_bytes: int = 0
    seconds: float = 0.0

    def note(self, rpc: Rpc, frames: Sequence[bytes], error: WeightplaneError | None) -> None:
        self.calls += 1
        self.sent_to.add(rpc.path)
        self.frames += len(frames)
        self.frame_bytes += sum(map(len, frames))
        word = _word(error)
        if word == "gRPC's DEADLINE_EXCEEDED":
            word = OPEN_STREAM if rpc.descriptor.server_streaming else f"{rpc.path} not answered in {CALL_SECONDS:g} s"
        self.answers[word] += 1
        fine = LEFT_TO_GRPC if rpc.path.startswith("/weightplane.") else (*LEFT_TO_GRPC, *WORDS_OF_OTHERS)
        if isinstance(error, RemoteError) and error.code not in fine:
            self.wrong.append(f"{rpc.path}: {error} after {[frame[:200].hex() for frame in frames]}")

    @property
    def growth_bytes(self) -> int:
        return self.end_bytes - self.warm_bytes

    @property
    def well(self) -> bool:
        return not self.wrong and self.growth_bytes <= MAX_GROWTH_BYTES

    def lines(self) -> Iterator[str]:
        rate = self.frames / self.seconds
        yield f"{self.frames} frames ({self.frame_bytes / 1e6:.1f} MB) in {self.calls} calls, {rate:.0f} frames/s"
        yield f"servers' memory: {self.warm_bytes >> 20} MiB once warm, {self.end_bytes >> 20} MiB at the end"
        for word, count in self.answers.most_common():
            yield f"  {count:6} {word}"
        yield from (f"WRONG {line}" for line in self.wrong[:10])


def _word(error: WeightplaneError | None) -> str:
    if error is None:
        return "OK"
    return f"gRPC's {error.code}" if isinstance(error, RemoteError) else error.reason


@dataclass(frozen=True)
class Target:
    """An RPC of a server, and what is drawn for it."""

    rpc: Rpc
    channel: grpc.aio.Channel
    drawn: Any


class Servers:
    """The process that is sent to."""

    def __init__(self, process: asyncio.subprocess.Process, told: dict[str, Any]) -> None:
        self.process = process
        self._told = told
        self._seen = psutil.Process(process.pid)
        # Our own channels would keep a message that is too long here.
        options = [option for option in CHANNEL_OPTIONS if option[0] != "grpc.max_send_message_length"]
        options.append(("grpc.max_send_message_length", -1))
        addresses = [address for address, _ in told["ports"].values()]
        self._channels = {a: grpc.aio.insecure_channel(a, options=options) for a in addresses}

    def memory_bytes(self) -> int:
        return int(self._seen.memory_info().rss)

    def targets(self) -> list[Target]:
        found = []
        for address, services in self._told["ports"].values():
            for rpc in every_rpc(set(services)):
                known = {"run_id": self._told["run"], "engine_id": "e0", "model": "policy"}
                if rpc.path != UNTIMELY:
                    known["incarnation"] = self._told["incarnation"]
                every = [r.descriptor.input_type for r in every_rpc()]
                streams = bool(rpc.descriptor.client_streaming)
                drawn = calls(rpc.descriptor.input_type, every, Texts(known), streams)
                found.append(Target(rpc, self._channels[address], drawn))
        return found

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()


@asynccontextmanager
async def servers(directory: Path) -> AsyncIterator[Servers]:
    """Running. Raises RuntimeError at the end if they are not any more."""
    command = [sys.executable, "-m", "tests.fuzz.servers", str(directory)]
    with (directory / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE, stderr=log)
    try:
        await eventually((directory / "ports.json").exists, within=30)
        found = Servers(process, json.loads((directory / "ports.json").read_text()))
        yield found
        await found.close()
        if process.returncode is not None:
            raise RuntimeError(
                f"the servers ended with {process.returncode}: {(directory / 'log').read_text()[-2000:]}"
            )
    finally:
        if process.returncode is None:
            assert process.stdin is not None, "it was made with one"
            process.stdin.close()
            try:
                await asyncio.wait_for(process.wait(), 20)
            except TimeoutError:
                process.kill()
                await process.wait()


async def fuzz(frames: int, first_seed: int, directory: Path) -> Report:
    """At least `frames` of them."""
    report, began = Report(), time.monotonic()
    async with servers(directory) as running:
        targets = running.targets()
        await _too_long(targets, report)
        loop, round_ = asyncio.get_running_loop(), 0
        while report.frames < frames:
            drawn: list[list[tuple[Target, list[bytes]]]] = []
            await loop.run_in_executor(None, _draw, targets, first_seed + round_, drawn)
            for at in range(0, len(drawn), BATCHES):
                await asyncio.gather(*(_send(batch, report) for batch in drawn[at : at + BATCHES]))
            round_ += 1
            if not report.warm_bytes and report.frames > frames * WARM_SHARE:
                report.warm_bytes = running.memory_bytes()
        report.end_bytes = running.memory_bytes()
        report.wrong += await _silent(targets)
    report.seconds = time.monotonic() - began
    return report


def _draw(targets: Sequence[Target], number: int, into: list[list[tuple[Target, list[bytes]]]]) -> None:
    """Some batches, the same for the same number."""
    one = st.sampled_from(range(len(targets))).flatmap(lambda i: targets[i].drawn.map(lambda f: (targets[i], f)))

    @seed(number)
    @settings(max_examples=25, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=_ALL)
    @given(st.lists(one, min_size=BATCH, max_size=BATCH))
    def draw(batch: list[tuple[Target, list[bytes]]]) -> None:
        into.append(batch)

    draw()


_ALL = list(HealthCheck)


async def _send(batch: Sequence[tuple[Target, list[bytes]]], report: Report) -> None:
    ended = await asyncio.gather(*(_call(target, frames) for target, frames in batch))
    for (target, frames), error in zip(batch, ended, strict=True):
        report.note(target.rpc, frames, error)


async def _call(target: Target, frames: list[bytes]) -> WeightplaneError | None:
    """Again where the status was lost on its way, which grpcio does to a client that is still writing."""
    limit = STREAM_SECONDS if target.rpc.descriptor.server_streaming else CALL_SECONDS
    for _ in range(TRIES):
        error = await target.rpc.call(target.channel, frames, limit)
        if not (isinstance(error, RemoteError) and error.text == LOST_STATUS):
            return error
    return None


async def _too_long(targets: Sequence[Target], report: Report) -> None:
    """One message of more than 4 MiB to each RPC."""
    frame = [oversized()]
    for at in range(0, len(targets), BATCH):
        await _send([(target, frame) for target in targets[at : at + BATCH]], report)


async def _silent(targets: Sequence[Target]) -> list[str]:
    """Those that do not answer an honest question any more."""
    wrong = []
    for target in targets:
        if target.rpc.path in ("/grpc.health.v1.Health/Check", "/weightplane.v1.Operator/GetFleet"):
            error = await target.rpc.call(target.channel, [b""], 5.0)
            if error is not None:
                wrong.append(f"{target.rpc.path} answers {error} afterwards")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.fuzz.run", description="Send malformed frames to every service.")
    parser.add_argument("--frames", type=int, default=FRAMES)
    parser.add_argument("--seed", type=int, default=1)
    given_ = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="weightplane-fuzz-") as directory:
        report = asyncio.run(fuzz(given_.frames, given_.seed, Path(directory)))
    print("\n".join(report.lines()))
    return 0 if report.well else 1


if __name__ == "__main__":
    sys.exit(main())
