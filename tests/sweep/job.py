"""One rank of a sweep: builds the model in each topology in turn, and writes what its source yields as JSON.

    RANK=0 WORLD_SIZE=4 python -m tests.sweep.job --rendezvous FILE --models DIR --out DIR --topologies FILE

One set of processes runs all topologies, since importing megatron-core takes longer than any of them. Facts only:
what must hold is for the test to say.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from controlplane.processes import set_death_signal
from tests.support.hf_models import checkpoint
from tests.support.megatron_logits import logit_error
from tests.support.peak_memory import PeakMemory
from tests.sweep.pushes import write_json
from tests.sweep.topology import Topology
from trainer_agent.megatron.source import MegatronSource

COLLECTIVE_TIMEOUT_SECONDS = 60
Hook = Callable[[MegatronSource, Topology], Mapping[str, Any]]
"""What else is done with each source, collectively: it returns facts. Named on the command line as module:function."""


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--rendezvous", required=True)
    arguments.add_argument("--models", type=Path, required=True)
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--topologies", type=Path, required=True)
    arguments.add_argument("--hook", action="append", default=[])
    arguments.add_argument("--logits", action="store_true", help="also compare with transformers (float32 models)")
    given = arguments.parse_args()
    set_death_signal(signal.SIGKILL)
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{given.rendezvous}",
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_SECONDS),
    )
    hooks = [_hook(name) for name in given.hook]
    for number, fields in enumerate(json.loads(given.topologies.read_text())):
        topology = Topology(**fields)
        facts = _facts(topology, given.models / topology.model, hooks, logits=given.logits)
        write_json(given.out / f"{number}.rank{rank}.json", facts)
    # Groups that a topology broke may not be closed in good order any more.
    os._exit(0)


def _facts(topology: Topology, model_dir: Path, hooks: Sequence[Hook], *, logits: bool) -> dict[str, Any]:
    began = time.monotonic()
    try:
        chunks = _build(topology, model_dir)
        source = MegatronSource(chunks, model_dir)
        facts = {"build_seconds": time.monotonic() - began} | _export_facts(source, chunks, model_dir)
        facts["hook"] = {key: fact for hook in hooks for key, fact in hook(source, topology).items()}
    except Exception:
        return {"failure": traceback.format_exc(limit=-6)}
    facts["failure"] = None
    if logits and topology.dtype == "float32" and topology.computes_on_a_cpu:
        facts |= _logit_facts(chunks, model_dir)
    return facts


def _export_facts(source: MegatronSource, chunks: list[Any], model_dir: Path) -> dict[str, Any]:
    """What one iteration yields, against the checkpoint that the model was loaded from."""
    reference = checkpoint(model_dir)
    metadata = source.metadata()
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    memory, expert_memory = PeakMemory(parameters), PeakMemory(parameters)
    began = time.monotonic()
    names: list[str] = []
    wrong: list[str] = []
    tensors = iter(source)
    for stated in metadata:
        with expert_memory if ".experts." in stated.name else memory:
            name, tensor = next(tensors)
        names.append(name)
        if not _same_bits(tensor, reference.get(name)):
            wrong.append(name)
    wrong += [f"{name}, which metadata() does not state" for name, _ in tensors]
    return {
        "export_seconds": time.monotonic() - began,
        "names": len(names),
        "wrong": wrong,
        "missing": sorted(reference.keys() - set(names)),
        "metadata_agrees": _metadata_agrees(metadata, names, reference),
        "ties": [list(tie) for tie in source.ties()],
        "peak_bytes": memory.peak_bytes,
        "expert_peak_bytes": expert_memory.peak_bytes,
        "largest_bytes": max(t.nbytes for t in reference.values()),
        "layer_bytes": max(_bytes_by_layer(reference).values()),
        "parameters": len(parameters),
    }


def _same_bits(tensor: torch.Tensor, reference: torch.Tensor | None) -> bool:
    if reference is None or (tensor.dtype, tensor.shape) != (reference.dtype, reference.shape):
        return False
    return torch.equal(tensor.contiguous().view(torch.uint8), reference.view(torch.uint8))


def _metadata_agrees(metadata: Any, names: list[str], reference: Mapping[str, torch.Tensor]) -> bool:
    stated = [(m.name, m.dtype, m.shape) for m in metadata]
    return stated == [(n, reference[n].dtype, tuple(reference[n].shape)) for n in names if n in reference]


def _bytes_by_layer(reference: Mapping[str, torch.Tensor]) -> dict[str, int]:
    layers: dict[str, int] = {}
    for name, tensor in reference.items():
        if ".layers." in name:
            layer = name.split(".")[2]
            layers[layer] = layers.get(layer, 0) + tensor.nbytes
    return layers


def _logit_facts(chunks: list[Any], model_dir: Path) -> dict[str, Any]:
    """What Megatron can't do on a CPU belongs to the facts: the export does not depend on a forward pass."""
    try:
        return {"logit_error": logit_error(chunks, model_dir), "logit_failure": None}
    except Exception:
        return {"logit_error": None, "logit_failure": traceback.format_exc(limit=-2)}


def _build(topology: Topology, model_dir: Path) -> list[Any]:
    from trainer_agent.megatron.build import build_from_hf

    _destroy_groups()
    overrides: dict[str, Any] = {}
    if topology.virtual_pipeline > 1:
        overrides |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    if topology.layout:
        overrides["pipeline_model_parallel_layout"] = topology.layout
    return build_from_hf(
        model_dir,
        tensor_parallel=topology.tensor,
        pipeline_parallel=topology.pipeline,
        virtual_pipeline=topology.virtual_pipeline,
        context_parallel=topology.context,
        expert_parallel=topology.expert,
        expert_tensor_parallel=topology.expert_tensor,
        **overrides,
    )


def _destroy_groups() -> None:
    """Megatron only forgets most of its groups; their sockets and threads would stay."""
    from megatron.core import parallel_state

    if not parallel_state.is_initialized():
        return
    gc.collect()
    dist.barrier()
    groups = [g for g in parallel_state._global_process_group_list if g is not None]
    parallel_state.destroy_model_parallel()
    for group in groups:
        if group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)


def _hook(name: str) -> Hook:
    module, _, function = name.partition(":")
    found: Hook = getattr(importlib.import_module(module), function)
    return found


if __name__ == "__main__":
    main()
