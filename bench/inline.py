"""The inline way, from a rank's tensors to an engine agent's memory, against grpc.aio's own limit on this machine.

inline link: from the first frame of bytes that lie in a segment already to the engine agent's word that all are in
and checked. The sending agent reads the segment, cuts it into frames of 1 MiB and writes them; the engine agent reads,
places and sums. Left out: the rank's copy and sum, begin, the frames before the first chunk, go, the install.

inline stream: the whole, by the clock of the coordinator, from an update's begin until its go. The rank exports
and sums 269 MB into its ring, and its agent and the engine's do the above.

The other: as many messages of 1 MiB that exist already, over a stream whose receiver drops them, from the first
write to the receiver's word that all came. All over loopback with the same channel options, each end a process. The
agents' allocators keep what is freed. The stream that rows with a goal are against is as anybody would write it; in the
last row its two ends have the agents' allocator too.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch

from bench.bare_stream import bare_stream
from bench.harness import Row, Timed, interleave, spread
from bench.inline_ends import inline_link
from bench.wire_fleet import Weights, wire_fleet

DEADLINE_SECONDS = 240
QUICK_DEADLINE_SECONDS = 90
GOAL = 0.8


def measure(quick: bool) -> list[Row]:
    torch.set_num_threads(1)
    weights = Weights.random()
    with ExitStack() as stack:
        fleet = stack.enter_context(wire_fleet(weights, transport="inline"))
        afresh = stack.enter_context(wire_fleet(weights, transport="inline", keep_staging=False))
        samples = interleave(
            {
                "ours": lambda: fleet.push().to_go,
                "afresh": lambda: afresh.push().to_go,
                "link": stack.enter_context(inline_link()),
                "grpc.aio": stack.enter_context(bare_stream(weights.byte_count)),
                "kept": stack.enter_context(bare_stream(weights.byte_count, kept=True)),
            },
            rounds=2 if quick else 15,
            warm_up=1 if quick else 2,
        )
    size = f"{weights.byte_count / 1e6:.0f} MB"
    push, link = f"begin to go of a push of {size}", f"{size} from a segment to an engine agent's memory"
    bare = "against as many bytes in a bare stream of grpc.aio"
    rows = [
        ("inline stream", f"{push}, {bare}", samples["ours"], samples["grpc.aio"]),
        ("inline stream, keep_staging = false", f"{push}, {bare}", samples["afresh"], samples["grpc.aio"]),
        ("inline link", f"{link}, {bare}", samples["link"], samples["grpc.aio"]),
        ("inline link, kept heaps", f"{link}, {bare} with the agents' allocator", samples["link"], samples["kept"]),
    ]
    return [_row(*row, weights.byte_count) for row in rows]


def _row(name: str, what: str, ours: Sequence[float], other: Sequence[float], byte_count: int) -> Row:
    rates = [byte_count / spread(seconds).median / 1e9 for seconds in (ours, other)]
    note = f"{rates[0]:.2f} and {rates[1]:.2f} GB/s; copies: docs/performance.md"
    return Timed(name, what, ours, other, note, against="grpc.aio").quicker(GOAL)
