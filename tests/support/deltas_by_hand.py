"""Deltas written by hand, element by element, to an engine agent of a local fleet; and which streams were deltas."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from controlplane.core import engine_events as events
from controlplane.core.engine_state import KeptBase
from engine_agent.services import update_frames
from tests.support.local_fleet import LocalFleet
from tests.support.writer import LAYOUT, Stream, Weights
from weightplane.v1 import fleet_pb2, layout_pb2, version_pb2, weight_update_pb2

ITEM = 4
"""Bytes of an element of LAYOUT."""


def trained(weights: Weights, tensors: Iterable[int] = (0,), count: int = 5) -> Weights:
    """The weights after a step that changed a few elements of those tensors."""
    parts = [bytearray(p) for p in weights.parts]
    for tensor in tensors:
        for at in random.sample(range(len(parts[tensor]) // ITEM), count):
            parts[tensor][at * ITEM] ^= 1 + random.randrange(255)
    return Weights([bytes(p) for p in parts])


def base_of(version: version_pb2.WeightVersion, weights: Weights) -> weight_update_pb2.Base:
    return weight_update_pb2.Base(version=version, content_digest=weights.digest)


def open_delta(
    fleet: LocalFleet,
    begun: fleet_pb2.BeginUpdateResponse,
    base: weight_update_pb2.Base,
    engine_id: str = "e0",
    **changed: Any,
) -> Stream:
    manifest = weight_update_pb2.Manifest(
        layout_digest=LAYOUT.digest, tensor_count=len(LAYOUT.tensors), byte_count=LAYOUT.byte_count, base=base
    )
    return fleet.stream(begun, engine_id, **{"manifest": manifest} | changed)


def elements(old: bytes, new: bytes) -> list[int]:
    return [i for i in range(len(new) // ITEM) if old[i * ITEM : i * ITEM + ITEM] != new[i * ITEM : i * ITEM + ITEM]]


def record(tensor: int, old: Weights, new: Weights, start: int = 0) -> tuple[weight_update_pb2.TensorRecord, bytes]:
    """What changed of a tensor, and its bytes, which lie `start` bytes into the chunk."""
    found, fresh = elements(old.parts[tensor], new.parts[tensor]), new.parts[tensor]
    data = b"".join(i.to_bytes(4, "little") for i in found)
    data += b"".join(fresh[i * ITEM : i * ITEM + ITEM] for i in found)
    described = weight_update_pb2.TensorRecord(
        tensor=tensor,
        tensor_offset=0,
        buffer_offset=start,
        byte_count=len(data),
        checksum=new.checksums[tensor],
        changed_elements=len(found),
    )
    return described, data


async def send_delta(stream: Stream, old: Weights, new: Weights) -> int:
    """What changed, in one chunk, and the last chunk, an empty one. Bytes sent."""
    records, data = [], b""
    for tensor, part in enumerate(new.parts):
        if part != old.parts[tensor]:
            described, bytes_of_it = record(tensor, old, new, len(data))
            records.append(described)
            data += bytes_of_it
    await send_chunk(stream, 0, records, data)
    await send_chunk(stream, 1, [], b"", last=True)
    return len(data)


async def send_chunk(
    stream: Stream, index: int, records: list[weight_update_pb2.TensorRecord], data: bytes, *, last: bool = False
) -> None:
    buffers = [layout_pb2.BufferHandle(inline=data)]
    chunk = weight_update_pb2.Chunk(version=stream.version, index=index, records=records, buffers=buffers, last=last)
    await stream.send(chunk=chunk)


async def until_ready(stream: Stream) -> None:
    while (await stream.read()).WhichOneof("frame") != "ready":
        pass


async def push_delta(
    fleet: LocalFleet, base: weight_update_pb2.Base, old: Weights, new: Weights
) -> fleet_pb2.UpdateState:
    """To e0, the only engine of the plan."""
    begun = await fleet.begin()
    stream = open_delta(fleet, begun, base)
    accepted = await stream.open()
    assert not accepted.layout_needed
    size = await send_delta(stream, old, new)
    await until_ready(stream)
    await fleet.go(begun.update_id)
    await stream.commit(new, byte_count=size)
    return await fleet.decided(begun.update_id)


def staged_files() -> list[Path]:
    """The unnamed files of this process that hold staged weights or a base."""
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        try:
            if "weightplane-staging" in os.readlink(path):
                found[path.stat().st_ino] = path  # a mapping keeps a descriptor of its own
        except FileNotFoundError:
            continue
    return list(found.values())


def spoil(at: int) -> None:
    """One bit of a byte of the base, the only one that is kept in this process."""
    (path,) = staged_files()
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


Opened = tuple[int, str, int | None]
"""Version, engine, and the base's number if it was a delta."""


def watch_opens(monkeypatch: pytest.MonkeyPatch) -> list[Opened]:
    """Every stream that is opened to an engine of this process from now on."""
    seen: list[Opened] = []
    real = update_frames.opened

    def spy(stream: int, message: weight_update_pb2.UpdateOpen, kept: KeptBase | None = None) -> events.Opened:
        manifest = message.manifest
        base = manifest.base.version.number if manifest.HasField("base") else None
        seen.append((message.version.number, message.engine.engine_id, base))
        return real(stream, message, kept)

    monkeypatch.setattr(update_frames, "opened", spy)
    return seen
