"""The inline way, from a rank's tensors to an engine agent's memory, against grpc.aio's own limit on this machine.

Ours: the clock of the coordinator, from an update's begin until its go: the rank exports and sums 269 MB into its ring,
its agent cuts that into frames of 1 MiB, and the engine's agent places and sums them. The other: as many messages of
1 MiB that exist already, over a stream whose receiver drops them; from the first write to the receiver's word that all
came. Both over loopback with the same channel options, each end a process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from bench.bare_stream import bare_receiver, send
from bench.harness import Row, Timed, interleave, spread
from bench.wire_fleet import Weights, wire_fleet

DEADLINE_SECONDS = 240
QUICK_DEADLINE_SECONDS = 90
MESSAGE_BYTES = 1 << 20
GOAL = 0.8


def measure(quick: bool) -> list[Row]:
    torch.set_num_threads(1)
    weights = Weights.random()
    messages = [os.urandom(MESSAGE_BYTES) for _ in range(weights.byte_count // MESSAGE_BYTES)]
    with (
        bare_receiver() as address,
        wire_fleet(weights, transport="inline") as fleet,
        wire_fleet(weights, transport="inline", keep_staging=False) as afresh,
    ):
        samples = interleave(
            {
                "ours": lambda: fleet.push().to_go,
                "afresh": lambda: afresh.push().to_go,
                "grpc.aio": lambda: send(address, messages),
            },
            rounds=2 if quick else 15,
            warm_up=1 if quick else 2,
        )
    byte_count, other = weights.byte_count, samples["grpc.aio"]
    return [
        _row("inline stream", samples["ours"], other, byte_count),
        _row("inline stream, keep_staging = false", samples["afresh"], other, byte_count),
    ]


def _row(name: str, ours: Sequence[float], other: Sequence[float], byte_count: int) -> Row:
    rates = [byte_count / spread(seconds).median / 1e9 for seconds in (ours, other)]
    what = f"begin to go of a push of {byte_count / 1e6:.0f} MB, against as many bytes in a bare stream of grpc.aio"
    note = f"{rates[0]:.2f} and {rates[1]:.2f} GB/s; copies: docs/performance.md"
    return Timed(name, what, ours, other, note, against="grpc.aio").quicker(GOAL)
