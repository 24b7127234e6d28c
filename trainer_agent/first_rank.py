"""What the first rank knows, on every rank: as JSON in a tensor, over torch.distributed's default group.

Promises that nothing is unpickled: torch's own collectives for objects load pickles out of what the group's connections
bring, which nobody authenticates. Refuses what is no JSON, and more than `MAX_BYTES`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, fields, is_dataclass
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

import torch
import torch.distributed as dist

from controlplane.core.errors import LimitExceeded

T = TypeVar("T")
MAX_BYTES = 256 << 20
"""Of one thing told: a batch of rollouts has some MB."""


def from_first(kind: type[T], make: Callable[[], T]) -> T:
    """What `make` returned on rank 0; it is not called on the others. Collective. `kind`: what it is made of, of
    dataclasses, lists, tuples of one type, text, numbers.

    Raises:
        LimitExceeded: it is too long, on every rank. TypeError, ValueError, KeyError: it is not of that kind.
    """
    first = dist.get_rank() == 0
    data = json.dumps(make(), default=asdict).encode() if first else b""
    size = torch.tensor([len(data)], dtype=torch.int64, device=_device())
    dist.broadcast(size, src=0)
    count = int(size.item())
    if not 0 < count <= MAX_BYTES:
        raise LimitExceeded(what="bytes that the first rank tells the others", limit=MAX_BYTES, got=count)
    told = torch.frombuffer(bytearray(data or count), dtype=torch.uint8).to(_device())
    dist.broadcast(told, src=0)
    return cast("T", _made(kind, json.loads(bytes(told.cpu().numpy()))))


def _device() -> torch.device:
    """Where the default group takes tensors: gloo from host memory, NCCL from the GPU."""
    on_host = "cpu:" in dist.get_backend_config()
    return torch.device("cpu") if on_host else torch.device("cuda", torch.cuda.current_device())


def _made(kind: Any, value: Any) -> Any:
    if is_dataclass(kind):
        kinds = get_type_hints(kind)
        return cast("Any", kind)(**{f.name: _made(kinds[f.name], value[f.name]) for f in fields(kind)})
    container = get_origin(kind)
    return container(_made(get_args(kind)[0], item) for item in value) if container in (list, tuple) else value
