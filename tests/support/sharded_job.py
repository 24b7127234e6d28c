"""Two ranks whose modules are sharded by torch: what does each rank's ModuleSource yield?

    RANK=0 WORLD_SIZE=2 python -m tests.support.sharded_job RENDEZVOUS OUT

Facts only, as JSON: for each case the digests of what is yielded and of what torch itself says the whole state is.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from controlplane.core.errors import LayoutInvalid
from trainer_agent.sources.module import ModuleSource

TIMEOUT_SECONDS = 60
WIDTH, WORDS = 6, 11
"""Eleven rows do not divide over two ranks."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("positions", torch.zeros(3))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden).relu()
        return self.head(self.norm(hidden))  # type: ignore[no-any-return]


def main() -> None:
    rendezvous, out = sys.argv[1], Path(sys.argv[2])
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
    )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    facts = {
        "plain": facts_of(Model()),
        "ddp": facts_of(DistributedDataParallel(Model())),
        "fsdp2": fsdp2_facts(mesh),
        "dtensor": facts_of(_split_by_hand(mesh)),
        "fsdp1": {"refused": _refusal(FullyShardedDataParallel(Model(), device_id=torch.device("cpu")))},
    }
    (out / f"rank{rank}.json").write_text(json.dumps(facts))
    dist.barrier()
    dist.destroy_process_group()


def facts_of(module: nn.Module) -> dict[str, Any]:
    source = ModuleSource(module)
    yielded = digests(source)
    return {
        "metadata": [[m.name, str(m.dtype), list(m.shape)] for m in source.metadata()],
        "ties": [list(tie) for tie in source.ties()],
        "yielded": yielded,
        "state": whole_state(module),
    }


def fsdp2_facts(mesh: DeviceMesh) -> dict[str, Any]:
    """Stored in float32, computed in bfloat16; before, between and after a training step."""
    module = Model()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in module.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    source = ModuleSource(module)
    facts: dict[str, Any] = facts_of(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    loss = module(torch.tensor([[1, 2, 3 + dist.get_rank()]])).float().square().sum()
    facts["unsharded_by_forward"] = sorted(n for n, p in module.named_parameters() if not hasattr(p, "full_tensor"))
    facts["after_forward"] = digests(source)
    # Exporting between the two passes has put the parameters away; the backward pass gathers them again.
    loss.backward()
    optimizer.step()
    return facts | {"trained": digests(source), "trained_state": whole_state(module)}


def _split_by_hand(mesh: DeviceMesh) -> nn.Module:
    """As tensor parallelism does: some by rows, also unevenly, some by columns, some not at all."""
    module = Model()
    embedding = nn.Parameter(distribute_tensor(module.embed.weight.data, mesh, [Shard(0)]))
    module.embed.weight = module.head.weight = embedding
    for layer, placement in zip(module.layers, (Shard(1), Replicate()), strict=True):
        assert isinstance(layer, nn.Linear)
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.data, mesh, [placement]))
    return module


def _refusal(module: nn.Module) -> str:
    try:
        ModuleSource(module)
    except LayoutInvalid as error:
        return str(error)
    return ""


def whole_state(module: nn.Module) -> dict[str, str]:
    """What torch's own checkpointing says the whole parameters are."""
    state = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=False))
    names = [name for name, _ in Model().named_parameters()]
    return digests((name, t) for name in names if isinstance(t := state[name], Tensor))


def digests(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    return {n: hashlib.sha256(t.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest() for n, t in tensors}


if __name__ == "__main__":
    main()
