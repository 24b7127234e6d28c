"""Broadcasts over gloo and bytes by reference, each against what lies under it.

The link alone: 269 MB in pieces of 64 MiB through `SenderLink` and `ReceiverLink`, against one broadcast of them by
raw gloo between two processes; from the first piece to the receiver's word. The whole push: begin to go by the
coordinator's clock, in which the rank also copies and sums, and the engine's agent sums, against the same raw gloo.
shared_memory: begin to go of the same push, against one memcpy of its bytes into memory that is there.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

import torch

from bench.harness import Row, Timed, interleave, paired_ratio, spread
from bench.raw_gloo import link_pair, raw_pair
from bench.wire_fleet import Weights, wire_fleet

DEADLINE_SECONDS = 240
QUICK_DEADLINE_SECONDS = 90
PIECE_BYTES = 64 << 20
GOAL = 0.9


def measure(quick: bool) -> list[Row]:
    torch.set_num_threads(1)
    weights, rounds = Weights.random(), 2 if quick else 15
    return [*_broadcasts(weights, rounds), _by_reference(weights, rounds)]


def _broadcasts(weights: Weights, rounds: int) -> list[Row]:
    data = torch.randint(0, 255, (weights.byte_count,), dtype=torch.uint8)
    pieces = [data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES)]
    with ExitStack() as stack:
        raw = stack.enter_context(raw_pair([data]))
        link = stack.enter_context(link_pair(pieces))
        fleet = stack.enter_context(wire_fleet(weights, transport="broadcast"))
        afresh = stack.enter_context(wire_fleet(weights, transport="broadcast", keep_staging=False))
        ways = {"link": link, "push": lambda: fleet.push().to_go, "afresh": lambda: afresh.push().to_go, "gloo": raw}
        samples = interleave(ways, rounds=rounds, warm_up=1)
    size, gloo = f"{weights.byte_count / 1e6:.0f} MB", samples["gloo"]
    push = f"begin to go of a push of {size}, against raw gloo"
    rows = [
        Timed("broadcast link", f"{size} through a link, against raw gloo", samples["link"], gloo, against="gloo"),
        Timed("broadcast push", push, samples["push"], gloo, against="gloo"),
        Timed("broadcast push, keep_staging = false", push, samples["afresh"], gloo, against="gloo"),
    ]
    return [row.quicker(GOAL) for row in rows]


def _by_reference(weights: Weights, rounds: int) -> Row:
    source = torch.randint(0, 255, (weights.byte_count,), dtype=torch.uint8)
    target = torch.zeros_like(source)

    def memcpy() -> float:
        started = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - started

    with wire_fleet(weights, transport="shared_memory") as fleet:
        samples = interleave({"ours": lambda: fleet.push().to_go, "memcpy": memcpy}, rounds=rounds, warm_up=1)
    ours, other = samples["ours"], samples["memcpy"]
    return Row(
        name="shared_memory push",
        what=f"begin to go of a push of {weights.byte_count / 1e6:.0f} MB, against one memcpy of them",
        ours=spread(ours).median,
        other=spread(other).median,
        unit="s",
        ratio=paired_ratio(ours, other),
        goal="",
        met=None,
        note="ours / other; each byte is copied once and summed twice",
        samples=samples,
    )
