"""A trainer that is written for vLLM's own trainer engines: its factory, its source, and our client.

    python -m tests.support.vllm_sends COORDINATOR MODEL_DIR WORK_DIR UPDATES

Sends a model's weights, other ones at each step, and waits for WORK_DIR/next-N after update N. The last update goes
through the client's four calls, tensor by tensor. Prints a JSON line after each.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from tests.support.megatron_pushes import await_file
from tests.support.tiny_rank import EMBEDDING_NAME, TinyWeights
from tests.support.toy_rank import say
from trainer_agent.adapters.vllm_client import WeightplaneSyncClient
from trainer_agent.adapters.vllm_engine import WeightplaneTrainerInitInfo, register

TIES = [("lm_head.weight", EMBEDDING_NAME)]


def main() -> None:
    coordinator, model_dir, work, updates = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    register()
    weights = TinyWeights(model_dir)
    module: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    client = WeightplaneSyncClient(coordinator, push_timeout=120)
    engine = WeightTransferTrainerFactory.trainer_init(
        WeightplaneTrainerInitInfo(rank=0, ties=TIES), client=client, source=ModuleSource(module)
    )
    for step in range(1, updates):
        module.load_state_dict(weights.tensors_of(step), strict=False)
        engine.send_weights()
        _tell(client, step, work)
    engine.shutdown()
    module.load_state_dict(weights.tensors_of(updates), strict=False)
    by_hand = WeightplaneSyncClient(coordinator, push_timeout=120, label_is_step=True)
    by_hand.watch(ModuleSource(module), ties=TIES)
    by_hand.init_weight_transfer_engine({})
    by_hand.start_weight_update()
    for name, tensor in ModuleSource(module):
        stated = {"names": [name], "dtype_names": ["float32"], "shapes": [list(tensor.shape)]}
        by_hand.update_weights(stated | {"tensors": [tensor]})
    by_hand.finish_weight_update(str(updates))
    _tell(by_hand, updates, work)
    by_hand.shutdown_weight_transfer_engine()


def _tell(client: WeightplaneSyncClient, step: int, work: Path) -> None:
    report = client.report
    assert report is not None
    say(event="sent", step=report.step, version=report.version.number, term=report.version.term)
    await_file(work / f"next-{step}")


if __name__ == "__main__":
    main()
