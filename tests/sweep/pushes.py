"""What the ranks of a sweep do with each source besides comparing it: push it through every transport.

A hook (see `hooks`). For each transport the process that runs `receiving` offers a trainer agent's socket; the ranks
join it, push three times, and leave. Between pushes every weight changes its sign, so that a byte of the push before
would show. Facts: what the fleet reported, and on rank 0 what each engine said that it got.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from controlplane.core.layout import Layout
from tests.sweep.topology import Topology
from trainer_agent import wire
from trainer_agent.megatron.source import MegatronSource
from trainer_agent.rank import TrainerRank
from trainer_agent.rank.devices import CPU_DEVICE_VARIABLE
from trainer_agent.rank.feed import Feed, Tensors
from trainer_agent.rank.times import Times
from weightplane.local.v1 import rank_pb2
from weightplane.v1 import weight_update_pb2

DIRECTORY_VARIABLE = "WEIGHTPLANE_SWEEP_DIRECTORY"
OFFERS, RECEIVED = "offers", "received"
HOOK = "tests.sweep.pushes:push"
PUSHES = 3
OFFER_SECONDS = 90.0
PUSH_SECONDS = 60.0


def push(source: MegatronSource, topology: Topology) -> dict[str, Any]:
    """By transport: the reports, and on rank 0 what each engine got. The weights are left as they were."""
    directory = Path(os.environ[DIRECTORY_VARIABLE])
    offer = _await_offer(directory / OFFERS / f"{topology.name}.json")
    return {"pushed": {transport: _push(source, socket) for transport, socket in offer.items()}} | (
        {"received": _received(directory / RECEIVED / topology.name)} if dist.get_rank() == 0 else {}
    )


def _push(source: MegatronSource, socket: str) -> dict[str, Any]:
    os.environ[wire.RANK_SOCKET_VARIABLE] = socket
    os.environ[CPU_DEVICE_VARIABLE] = str(dist.get_rank())
    began = time.monotonic()
    with (
        _noted_ways() as ways,
        TrainerRank.join(source=source, join_timeout=PUSH_SECONDS, push_timeout=PUSH_SECONDS) as rank,
    ):
        reports = []
        for step in range(PUSHES):
            reports.append(rank.push(step))
            _turn_signs(source)
        if PUSHES % 2:
            _turn_signs(source)
    return {
        "numbers": [r.version.number for r in reports],
        "status": [r.status for r in reports],
        "outcomes": [r.outcomes for r in reports],
        "ways": ways,
        "seconds": time.monotonic() - began,
    }


@contextmanager
def _noted_ways() -> Iterator[dict[str, str]]:
    """By engine that this rank takes a part for: the transport that the plans named, which may prefer another one."""
    ways: dict[str, str] = {}
    run = Feed.run

    def noting(self: Feed, plan: rank_pb2.PushPlan, layout: Layout, tensors: Tensors, times: Times) -> None:
        for assignment in plan.assignments:
            name = weight_update_pb2.Transport.Name(assignment.transport).removeprefix("TRANSPORT_").lower()
            before = ways.setdefault(assignment.engine.engine_id, name)
            assert before == name, f"{assignment.engine.engine_id}: {before}, then {name}"
        run(self, plan, layout, tensors, times)

    with mock.patch.object(Feed, "run", noting):
        yield ways


@torch.no_grad()
def _turn_signs(source: MegatronSource) -> None:
    for chunk in source._chunks:
        for parameter in chunk.parameters():
            parameter.neg_()


def _received(directory: Path) -> dict[str, Any]:
    return {file.stem: json.loads(file.read_text()) for file in sorted(directory.glob("*.json"))}


def _await_offer(file: Path) -> dict[str, str]:
    give_up = time.monotonic() + OFFER_SECONDS
    while not file.exists():
        if time.monotonic() > give_up:
            raise TimeoutError(f"nobody offered {file.name}")
        time.sleep(0.01)
    offer: dict[str, str] = json.loads(file.read_text())
    return offer


def write_json(file: Path, content: Any) -> None:
    """Atomically: a reader finds all of it, or no file."""
    file.parent.mkdir(exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(content))
    part.rename(file)
