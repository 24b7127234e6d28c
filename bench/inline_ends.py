"""The two ends of the inline way by themselves: the product's stream at either side, and nobody who decides.

Each end is a process (`python -m bench.inline_ends`), with an allocator that is told what the agents' are. `send`: an
`EngineStream` over chunks that a rank's exporter wrote into a segment, as many times as asked. `take`: the
`WeightUpdateService` of a life with an in-memory engine, which is welcomed by hand where a coordinator's session would
do it. What a coordinator says of an update is said here: go at once.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import structlog
import torch

from bench.asked import answer_each, asked
from bench.wire_fleet import Weights, smollm2_shapes
from controlplane.allocator import keep_freed_memory
from controlplane.core.engine_events import FleetChanged
from controlplane.core.layout import DType, Layout
from controlplane.core.versions import Term
from controlplane.rpc.channels import open_channel
from controlplane.rpc.codec import layout_to_parts
from controlplane.rpc.server import start_server
from engine_agent.daemon.building import new_life, services_of
from engine_agent.daemon.settings import EngineSettings
from engine_agent.life.engine_life import EngineLifeHolder
from engine_agent.life.remembered import Memory
from engine_agent.memory.engine import MemorySettings
from trainer_agent.agent.chunk_log import ChunkLog
from trainer_agent.agent.stream import Cargo, EngineStream
from trainer_agent.agent.stubs import WeightUpdates
from trainer_agent.agent.watch import UpdateWatch
from trainer_agent.chunking import plan_segment
from trainer_agent.rank.exporter import Exporter, layout_of
from trainer_agent.rank.memory import WholeMemory
from trainer_agent.segments import Segment, SegmentPool
from weightplane.local.v1 import rank_pb2
from weightplane.v1 import fleet_pb2, fleet_pb2_grpc, layout_pb2, version_pb2, weight_update_pb2

RUN, ENGINE, TERM = "bench-inline", "e0", 1


class _Said(ChunkLog):
    """Everything was announced. The clock starts when the stream, accepted, asks for the first chunk."""

    started = 0.0

    async def chunk(self, index: int) -> rank_pb2.SendChunk | None:
        if index == 0:
            self.started = time.perf_counter()
        return await super().chunk(index)


class _AtOnce(UpdateWatch):
    """Nobody else decides: `go` is asked for when the engine's agent said `ready`, where the clock stops."""

    stopped = 0.0

    async def go(self) -> None:
        self.stopped = time.perf_counter()


class InlineLink:
    """The sending end. Its chunks lie in a segment before anything is timed."""

    def __init__(self, address: str, incarnation: str, weights: Weights, segment: Segment) -> None:
        self._address = address
        self._engine = version_pb2.EngineRef(engine_id=ENGINE, incarnation=incarnation)
        self._layout = layout_of(weights.source)
        self._chunks, self._end = _exported(self._layout, weights, segment)
        self._number = 0

    def send(self) -> float:
        """Seconds from the first chunk's frame to `ready`. Frames before it, and the install, are left out."""
        self._number += 1
        return asyncio.run(self._send())

    async def _send(self) -> float:
        said = _Said()
        for chunk in self._chunks:
            said.add(chunk)
        said.finish(self._end)
        async with open_channel(self._address) as channel:
            fleet: fleet_pb2_grpc.FleetAsyncStub = fleet_pb2_grpc.FleetStub(channel)
            begun = fleet_pb2.BeginUpdateResponse(update_id=f"u{self._number}", version=self._version)
            watch = _AtOnce(fleet, RUN, begun)
            stream = EngineStream(WeightUpdates(channel), self._cargo(), self._assignment(), said, watch)
            end = await stream.run()
        if end.error is not None:
            raise SystemExit(f"the stream ended: {end.error}")
        return watch.stopped - said.started

    @property
    def _version(self) -> version_pb2.WeightVersion:
        return version_pb2.WeightVersion(term=TERM, number=self._number)

    def _cargo(self) -> Cargo:
        layout = self._layout
        manifest = weight_update_pb2.Manifest(
            layout_digest=layout.digest,
            tensor_count=len(layout.tensors),
            byte_count=layout.byte_count,
            step=self._number,
        )
        head = weight_update_pb2.UpdateOpen(
            run_id=RUN,
            model="policy",
            update_id=f"u{self._number}",
            writer_term=TERM,
            version=self._version,
            plan_revision=1,
            manifest=manifest,
        )
        return Cargo(head, tuple(layout_to_parts(layout)))

    def _assignment(self) -> fleet_pb2.Assignment:
        transport = weight_update_pb2.TRANSPORT_INLINE
        return fleet_pb2.Assignment(engine=self._engine, endpoint=self._address, ranks=[0], transport=transport)


def _exported(layout: Layout, weights: Weights, segment: Segment) -> tuple[list[rank_pb2.SendChunk], rank_pb2.PushEnd]:
    plan = plan_segment(layout)
    exporter = Exporter(layout, plan, WholeMemory(plan, segment.memory))
    chunks = []
    for chunk in exporter.chunks(iter(weights.tensors.items())):
        said = rank_pb2.SendChunk(engine_ids=[ENGINE], index=chunk.index, records=chunk.records)
        said.buffers.add(
            shared_memory=layout_pb2.SharedMemoryRange(
                segment=segment.name, host_id="h", offset=chunk.start, byte_count=chunk.byte_count
            )
        )
        chunks.append(said)
    end = rank_pb2.PushEnd(
        engine_ids=[ENGINE],
        chunk_count=len(chunks),
        byte_count=exporter.byte_count,
        content_digest=exporter.content_digest,
    )
    return chunks, end


@contextmanager
def inline_link() -> Iterator[Callable[[], float]]:
    """A function that sends everything once, and returns the seconds."""
    with ExitStack() as ends:
        directory = ends.enter_context(tempfile.TemporaryDirectory())
        taker = ends.enter_context(asked("-m", __name__, "take", directory))
        yield ends.enter_context(asked("-m", __name__, "send", *taker.heard.split())).seconds


def _send(address: str, incarnation: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # the segment's name goes with the process
    weights, pool = Weights.random(), SegmentPool(RUN, 0)
    try:
        segment = pool.acquire(plan_segment(layout_of(weights.source)).byte_count)
        link = InlineLink(address, incarnation, weights, segment)
        answer_each("ready", link.send)
    finally:
        pool.close()


async def _take(directory: Path) -> None:
    settings = EngineSettings(
        engine_id=ENGINE,
        coordinator="127.0.0.1:1",  # nobody asks it
        run_id=RUN,
        state_dir=directory,
        backend="memory",
        memory=MemorySettings(tensors=smollm2_shapes(), dtype=DType.BF16),
        keep_staging=True,
    )
    holder = EngineLifeHolder()
    holder.life = life = new_life(settings, Memory(directory / "memory.json", RUN, settings.model), None)
    server = await start_server("127.0.0.1:0", services_of(holder, settings, asyncio.Event(), None))
    await life.start()
    life.apply(FleetChanged(coordinator_term=Term(1), term=Term(TERM), served=frozenset()))
    print(server.address, life.core.state.incarnation, flush=True)
    await server.server.wait_for_termination()


def main() -> None:
    """send, to which address and incarnation; or take, with a directory for its notes."""
    end, *words = sys.argv[1:]
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    keep_freed_memory()
    if end == "send":
        _send(*words)
    else:
        asyncio.run(_take(Path(*words)))


if __name__ == "__main__":
    main()
