"""A training loop of Megatron's own parts that teaches a fleet's engines to count: where docs/integrate.md leads to.

    python -m examples.run megatron_loop                # on this machine, a tiny model

Nothing of it is the demo's. What Weightplane adds to a loop are the lines that are marked.
"""

import argparse
import json
import os
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from controlplane.rollout.sample import Sample
from trainer_agent.megatron import cpu_shim
from weightplane import BlockingRolloutClient, MegatronSource, SamplingSettings, TrainerRank, WeightVersion

STEPS, EVERY, BATCH, LENGTH = 60, 20, 16, 24
PROMPT = (7, 8, 9)


def build(hf: dict[str, Any]) -> GPTModel:
    """What your job has already: a model split over all ranks, here from random weights."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # so small a model needs no GPU; before torch looks for one
    dist.init_process_group("gloo")
    cpu_shim.install()  # lets Megatron run without a GPU
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    model_parallel_cuda_manual_seed(1)
    sizes = {"num_layers": "num_hidden_layers", "hidden_size": "hidden_size", "ffn_hidden_size": "intermediate_size"}
    sizes |= {"num_attention_heads": "num_attention_heads", "num_query_groups": "num_key_value_heads"}
    shape = {ours: hf[theirs] for ours, theirs in sizes.items()}
    kind = {"normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False}
    off = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "bias_dropout_fusion": False, "apply_rope_fusion": False}
    world = {"tensor_model_parallel_size": dist.get_world_size(), "use_cpu_initialization": True}
    config = TransformerConfig(**shape, **kind, **off, **world, layernorm_epsilon=hf["rms_norm_eps"])
    spec, ties = get_gpt_layer_local_spec(normalization="RMSNorm"), hf["tie_word_embeddings"]
    place = {"position_embedding_type": "rope", "rotary_base": hf["rope_parameters"]["rope_theta"]}
    return GPTModel(config, spec, hf["vocab_size"], LENGTH, share_embeddings_and_output_weights=ties, **place)


def learn(model: GPTModel, optimizer: torch.optim.Optimizer, vocab: int) -> float:
    """A step on rows that count up from anywhere."""
    rows = (torch.randint(vocab, (BATCH, 1)) + torch.arange(LENGTH + 1)) % vocab
    tokens, labels, mask = rows[:, :-1], rows[:, 1:], torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
    loss = model(tokens, torch.arange(LENGTH).expand_as(tokens), mask, labels=labels).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def ask(coordinator: str, version: WeightVersion) -> Sample:
    """What engines say; in a process of its own, since no gRPC may live in one that trains."""
    with BlockingRolloutClient(coordinator) as rollouts:
        return rollouts.generate(PROMPT, SamplingSettings(max_tokens=5, temperature=0.0), min_version=version)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--model-dir", required=True, help="config.json of the model that the engines run")
    hf = json.loads(Path(options.parse_args().model_dir, "config.json").read_text())
    torch.manual_seed(0)  # the same rows on every rank
    model = build(hf)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    asker = get_context("spawn").Pool(1) if dist.get_rank() == 0 else None
    with TrainerRank.join(source=MegatronSource(model, hf)) as rank:  # Weightplane: once, on every rank
        report = rank.push(0)  # Weightplane: the first version, before any rollout
        for step in range(1, STEPS + 1):
            rank.set_step(step)  # Weightplane: what people see, and what keeps the lease
            loss = learn(model, optimizer, hf["vocab_size"])
            if step % EVERY == 0:
                report = rank.push(step)  # Weightplane: returns when the fleet has decided
                if asker:
                    said = asker.apply(ask, (os.environ["WEIGHTPLANE_COORDINATOR"], report.version))
                    print(f"step {step}  loss {loss:.3f}  {said.spans[0].version} counts: {PROMPT} {said.tokens}")


if __name__ == "__main__":
    main()
