"""A real Megatron job for tests: started as several processes, each of which writes what it saw as JSON.

    RANK=0 WORLD_SIZE=2 python -m tests.support.megatron_job --rendezvous FILE --models DIR --out DIR --cases JSON

One job runs many cases, since importing megatron-core takes longer than any of them. A case builds a
model from a Hugging Face directory, exports it, compares its logits with transformers', takes a training
step and exports it again. Facts only: what must hold is for the test to say.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.support.megatron_grouped import digests, grouped_facts

COLLECTIVE_TIMEOUT_SECONDS = 60
GATHER_DEADLINE_SECONDS = 2.0
SEQUENCE = 16
ROWS = 8
GROUPED = "qwen3_moe-tied"
MISFIT = "llama-tied"


@dataclass(frozen=True)
class Case:
    model: str
    """Directory below --models."""
    dtype: str = "float32"
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    virtual_pipeline: int = 1
    expert_parallel: int = 1
    vocab_multiple: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    train: bool = True
    """Else built, exported and asked for its logits only."""

    @property
    def name(self) -> str:
        return "-".join(str(v) for v in asdict(self).values())


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--rendezvous", required=True)
    arguments.add_argument("--models", type=Path, required=True)
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--cases", required=True)
    arguments.add_argument("--misfits", action="store_true", help="also do what must be refused or must fail")
    given = arguments.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    _start(given.rendezvous, rank, world)
    for fields in json.loads(given.cases):
        case = Case(**fields)
        _write(given.out / f"{case.name}.rank{rank}.json", run_case(case, given.models / case.model))
    _write(given.out / f"shim.rank{rank}.json", shim_facts())
    if given.misfits:
        grouped = grouped_facts(given.models / GROUPED, expert_parallel=world)
        _write(given.out / f"grouped.rank{rank}.json", grouped)
        _write(given.out / f"misfits.rank{rank}.json", misfit_facts(given.models / MISFIT))
        _write(given.out / f"offloaded.rank{rank}.json", offloaded_facts(given.models / MISFIT))
        for fault in (leave_early, stay_away):
            last = rank == world - 1
            _write(given.out / f"{fault.__name__}.rank{rank}.json", fault(given.models / MISFIT, last=last))
            _await_file(given.out / f"{fault.__name__}.rank0.json")
    # The process groups may be broken by now, on purpose: nothing is left to say to the others.
    os._exit(0)


def _write(file: Path, facts: Any) -> None:
    part = file.with_suffix(".part")
    part.write_text(json.dumps(facts))
    part.rename(file)


def _start(rendezvous: str, rank: int, world: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_SECONDS),
    )


def run_case(case: Case, model_dir: Path) -> dict[str, Any]:
    from tests.support.megatron_logits import logit_error
    from trainer_agent.megatron.source import MegatronSource

    facts: dict[str, Any] = {}
    if not case.train:
        chunks = _bare(case, model_dir)
        source = MegatronSource(chunks, model_dir)
        facts |= {"metadata": _metadata(source), "loaded": digests(source), "ties": source.ties()}
        return facts | {"logit_error": logit_error(chunks, model_dir)}
    learner = _learner(case, model_dir)
    source = MegatronSource(learner.model, model_dir)
    batch = _batch(json.loads((model_dir / "config.json").read_text())["vocab_size"])
    facts |= {"metadata": _metadata(source), "ties": source.ties(), "loaded": digests(source)}
    facts["logprob_error"] = _error_against_transformers(learner, batch, source, model_dir)
    facts["losses"] = [learner.step(batch).loss for _ in range(2)]
    facts["trained"] = digests(source)
    facts["trained_logprob_error"] = _error_against_transformers(learner, batch, source, model_dir)
    facts["losses"] += [learner.step(batch).loss for _ in range(2)]
    return facts


def shim_facts() -> dict[str, Any]:
    """What code outside megatron.core meets after the shim was installed."""
    import torch

    from trainer_agent.megatron import cpu_shim

    def refuses(use: Callable[[], object]) -> bool:
        try:
            use()
        except (AssertionError, RuntimeError):
            return True
        return False

    return {
        "installs_again": cpu_shim.install(),
        "device_refused": refuses(lambda: torch.cuda.current_device()),
        "tensor_refused": refuses(lambda: torch.zeros(1).cuda()),
        "factory_refused": refuses(lambda: torch.zeros(1, device="cuda")),
    }


def _learner(case: Case, model_dir: Path) -> Any:
    from megatron.core import parallel_state

    from trainer_agent.demo.learner import Learner, LearnerSettings

    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    import torch

    return Learner(
        model_dir,
        LearnerSettings(learning_rate=1e-2, micro_batch=2, distributed_optimizer=case.distributed_optimizer),
        tensor_parallel=case.tensor_parallel,
        pipeline_parallel=case.pipeline_parallel,
        expert_parallel=case.expert_parallel,
        dtype=getattr(torch, case.dtype),
        vocab_multiple=case.vocab_multiple,
        sequence_parallel=case.sequence_parallel,
    )


def _bare(case: Case, model_dir: Path) -> Any:
    from megatron.core import parallel_state

    from trainer_agent.megatron.build import build_from_hf

    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    return build_from_hf(
        model_dir,
        tensor_parallel=case.tensor_parallel,
        pipeline_parallel=case.pipeline_parallel,
        virtual_pipeline=case.virtual_pipeline,
        vocab_multiple=case.vocab_multiple,
        overlap_p2p_comm=case.virtual_pipeline > 1,
        batch_p2p_comm=case.virtual_pipeline == 1,
    )


def _batch(vocab: int) -> Any:
    import torch

    from trainer_agent.demo.objective import Trajectory, make_batch

    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, vocab, (ROWS, SEQUENCE + 1), generator=generator).tolist()
    trajectories = [Trajectory(tuple(row[:5]), tuple(row[5:]), (-3.0,) * (SEQUENCE - 4), 0.0) for row in ids]
    return make_batch(trajectories, [1.0, -1.0] * (ROWS // 2), SEQUENCE, ROWS)


def _metadata(source: Any) -> list[Any]:
    return [[name, str(dtype), list(shape)] for name, dtype, shape in source.metadata()]


def _error_against_transformers(learner: Any, batch: Any, source: Any, model_dir: Path) -> float | None:
    """Largest logprob difference between Megatron and transformers loaded with what the source exports."""
    import torch
    from megatron.core import parallel_state
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    exported = {name: tensor.clone().float() for name, tensor in source}
    mine = learner.logprobs(batch)
    if mine is None:
        return None
    config = AutoConfig.from_pretrained(model_dir)
    model, loading = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
        None,
        config=config,
        state_dict=exported,
        attn_implementation="sdpa",
        dtype=torch.float32,
        output_loading_info=True,
    )
    assert not any(loading[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys")), loading
    with torch.no_grad():
        logprobs = model.eval()(batch.tokens).logits.float().log_softmax(-1)
    theirs = logprobs.gather(-1, batch.labels[..., None])[..., 0]
    replica = parallel_state.get_data_parallel_rank()
    return float((mine - theirs[len(mine) * replica : len(mine) * (replica + 1)]).abs().max())


def misfit_facts(model_dir: Path) -> dict[str, str | None]:
    """What a source says whose model is not what its config says."""
    from trainer_agent.megatron.families import UnsupportedModel, read_config
    from trainer_agent.megatron.parameters import unwrap
    from trainer_agent.megatron.source import MegatronSource

    (model,) = _bare(Case("", pipeline_parallel=2), model_dir)
    config = read_config(model_dir)

    def refusal(**changes: object) -> str | None:
        try:
            MegatronSource(model, config | changes)
        except UnsupportedModel as error:
            return str(error)
        return None

    facts = {
        "fits": refusal(),
        "layers": refusal(num_hidden_layers=config["num_hidden_layers"] + 1),
        "fewer_layers": refusal(num_hidden_layers=config["num_hidden_layers"] - 1),
        "ffn": refusal(intermediate_size=2 * config["intermediate_size"]),
        "untied": refusal(tie_word_embeddings=False),
        "heads": refusal(num_attention_heads=4, num_key_value_heads=2, head_dim=16),
    }
    # On the last stage only: all the same, every stage has to refuse.
    unwrap(model).config.layernorm_zero_centered_gamma = model.post_process
    return facts | {"norms": refusal()}


def offloaded_facts(model_dir: Path) -> dict[str, Any]:
    """What every rank's source says when one rank's memory was taken away meanwhile (M5)."""
    from megatron.core import parallel_state

    from controlplane.core.errors import LayoutInvalid
    from trainer_agent.megatron.source import MegatronSource

    (model,) = _bare(Case("", tensor_parallel=2), model_dir)
    source = MegatronSource(model, model_dir)
    before = _metadata(source)
    # Who takes no more than is stated has not left early, though it never met the end.
    tensors = iter(source)
    taken = [next(tensors)[0] for _ in before]
    del tensors
    facts: dict[str, Any] = {"yielded": 0, "taken": len(taken), "again": len(list(source))}
    if parallel_state.get_tensor_model_parallel_rank() == 0:
        for parameter in model.parameters():
            parameter.data.untyped_storage().resize_(0)
    facts["metadata_unchanged"] = _metadata(source) == before
    try:
        for _ in source:
            facts["yielded"] += 1
    except LayoutInvalid as error:
        facts |= {"refused": str(error), "named": len(error.names)}
    return facts


def leave_early(model_dir: Path, *, last: bool) -> dict[str, Any]:
    """The last rank stops iterating after one tensor; what do the others meet?"""
    from trainer_agent.megatron.source import MegatronSource

    model = _bare(Case("", tensor_parallel=2), model_dir)
    source = MegatronSource(model, model_dir, deadline_seconds=GATHER_DEADLINE_SECONDS)
    if last:
        next(iter(source))
        return {"left": True, "again": _failure(lambda: list(source))}
    return _failure(lambda: list(source)) | {"again": _failure(lambda: list(source))}


def stay_away(model_dir: Path, *, last: bool) -> dict[str, Any]:
    """The last rank makes no source; what do the others meet?"""
    from trainer_agent.megatron.source import MegatronSource

    model = _bare(Case("", pipeline_parallel=2), model_dir)
    if last:
        return {"left": True}
    return _failure(lambda: MegatronSource(model, model_dir, deadline_seconds=GATHER_DEADLINE_SECONDS))


def _failure(gather: Callable[[], object]) -> dict[str, Any]:
    from trainer_agent.megatron.source import GatherFailed

    began = time.monotonic()
    try:
        gather()
    except GatherFailed as failure:
        return {"failure": str(failure), "seconds": time.monotonic() - began}
    return {"failure": None}


def _await_file(file: Path) -> None:
    """Stay alive, or the others would see a lost connection and not a deadline."""
    give_up = time.monotonic() + COLLECTIVE_TIMEOUT_SECONDS
    while not file.exists() and time.monotonic() < give_up:
        time.sleep(0.05)


if __name__ == "__main__":
    main()
