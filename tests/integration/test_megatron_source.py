"""MegatronSource against real Megatron: two processes over gloo, compared with the checkpoint and with transformers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.hf_models import save_random
from tests.support.megatron_job import GATHER_DEADLINE_SECONDS, GROUPED, Case
from tests.support.rank_job import run_ranks

pytestmark = pytest.mark.real

FAMILIES = ["llama", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe"]
MODELS: dict[str, dict[str, Any]] = {
    f"{family}-{kind}": {"family": family, "tied": kind == "tied"} for family in FAMILIES for kind in ("tied", "untied")
}
MODELS |= {f"{family}-bf16": {"family": family, "tied": True, "dtype": "bfloat16"} for family in ("llama", "qwen3_moe")}
DENSE = ["llama-tied", "llama-untied", "qwen2-tied", "qwen2-untied", "qwen3-untied"]
CASES = [
    *[Case(model, tensor_parallel=2) for model in DENSE],
    *[Case(model, pipeline_parallel=2) for model in DENSE],
    Case("llama-bf16", dtype="bfloat16", tensor_parallel=2),
    Case("llama-bf16", dtype="bfloat16", pipeline_parallel=2),
    Case("llama-untied", tensor_parallel=2, vocab_multiple=64, sequence_parallel=True),
    Case("llama-tied", pipeline_parallel=2, virtual_pipeline=2, train=False),
    Case("llama-tied", distributed_optimizer=True),
    Case("mixtral-untied", expert_parallel=2),
    Case("mixtral-untied", expert_parallel=2, distributed_optimizer=True),
    Case("qwen2_moe-tied", pipeline_parallel=2),
    Case("qwen3_moe-untied", tensor_parallel=2, sequence_parallel=True),
    Case("qwen3_moe-bf16", dtype="bfloat16", expert_parallel=2),
]
TRAINED = [case for case in CASES if case.train]
FLOAT32 = [case for case in TRAINED if case.dtype == "float32"]
COMPARABLE = [case for case in TRAINED if case.dtype == "float32" or "moe" not in case.model]
"""A router that computes in bfloat16 may choose another expert than one in float32: then nothing is alike."""
REFERENCES = [Case(model) for model in sorted({case.model for case in FLOAT32})]
WHOLE = [
    *[Case(model, train=False) for model in MODELS if not model.endswith("bf16")],
    *[Case(f"{family}-untied", vocab_multiple=64, train=False) for family in FAMILIES],
]
"""Each family's models on one rank, and with a padded vocabulary."""

FAULTS = ["grouped", "misfits", "offloaded", "leave_early", "stay_away"]
Facts = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name, kind in MODELS.items():
        save_random(root / name, **kind)
    return root


def run_job(world: int, models: Path, out: Path, cases: Sequence[Case], *extra: str) -> Facts:
    """Each case's facts, one dict a rank."""
    out.mkdir()
    where = ["--rendezvous", str(out / "rendezvous"), "--models", str(models), "--out", str(out)]
    what = ["--cases", json.dumps([asdict(c) for c in cases]), *extra]
    run_ranks(["tests.support.megatron_job", *where, *what], world, {"CUDA_VISIBLE_DEVICES": ""})
    names = ["shim", *[case.name for case in cases]] + (FAULTS if extra else [])
    return {n: [json.loads((out / f"{n}.rank{r}.json").read_text()) for r in range(world)] for n in names}


@pytest.fixture(scope="module")
def facts(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Facts:
    return run_job(2, models, tmp_path_factory.mktemp("two") / "out", CASES, "--misfits")


@pytest.fixture(scope="module")
def alone(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Facts:
    return run_job(1, models, tmp_path_factory.mktemp("one") / "out", [*REFERENCES, *WHOLE])


def digests(model_dir: Path) -> dict[str, str]:
    tensors = load_file(model_dir / "model.safetensors")
    return {n: hashlib.sha256(t.flatten().view(torch.uint8).numpy().tobytes()).hexdigest() for n, t in tensors.items()}


def ids(cases: Sequence[Case]) -> list[str]:
    return [case.name for case in cases]


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_what_was_loaded_is_exported_bit_for_bit_on_every_rank(case: Case, facts: Facts, models: Path) -> None:
    checkpoint = digests(models / case.model)
    for rank in facts[case.name]:
        assert rank["loaded"] == checkpoint


@pytest.mark.parametrize("case", WHOLE, ids=ids(WHOLE))
def test_every_familys_checkpoint_comes_back_bit_for_bit_and_means_the_same(
    case: Case, alone: Facts, models: Path
) -> None:
    """The checkpoint is transformers' own: its names, its files. The logits are of whole sequences."""
    (rank,) = alone[case.name]
    assert rank["loaded"] == digests(models / case.model)
    assert rank["logit_error"] <= 1e-5


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_metadata_is_the_same_on_every_rank_and_agrees_with_iteration(case: Case, facts: Facts, models: Path) -> None:
    first, second = facts[case.name]
    assert first["metadata"] == second["metadata"]
    assert [name for name, _, _ in first["metadata"]] == list(first["loaded"]) == list(second["loaded"])
    stored = load_file(models / case.model / "model.safetensors")
    assert {name: (dtype, tuple(shape)) for name, dtype, shape in first["metadata"]} == {
        name: (str(tensor.dtype), tuple(tensor.shape)) for name, tensor in stored.items()
    }


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_a_tied_output_layer_is_a_tie_and_has_no_bytes(case: Case, facts: Facts) -> None:
    tied = MODELS[case.model]["tied"]
    for rank in facts[case.name]:
        assert rank["ties"] == ([["lm_head.weight", "model.embed_tokens.weight"]] if tied else [])
        assert ("lm_head.weight" in rank["loaded"]) is not tied


@pytest.mark.parametrize("case", TRAINED, ids=ids(TRAINED))
def test_every_tensor_changes_in_training_and_every_rank_exports_the_same(case: Case, facts: Facts) -> None:
    first, second = facts[case.name]
    assert first["trained"] == second["trained"]
    unchanged = [name for name, digest in first["trained"].items() if digest == first["loaded"][name]]
    assert unchanged == []


@pytest.mark.parametrize("case", COMPARABLE, ids=ids(COMPARABLE))
def test_the_export_means_to_transformers_what_it_means_to_megatron(case: Case, facts: Facts) -> None:
    tolerance = 0.1 if case.dtype == "bfloat16" else 1e-5
    ranks = facts[case.name]
    errors = [r[key] for r in ranks for key in ("logprob_error", "trained_logprob_error") if r[key] is not None]
    assert errors
    assert max(errors) <= tolerance


@pytest.mark.parametrize("case", FLOAT32, ids=ids(FLOAT32))
def test_training_does_not_depend_on_how_the_model_is_split(case: Case, facts: Facts, alone: Facts) -> None:
    (reference,) = alone[Case(case.model).name]
    for rank in facts[case.name]:
        assert rank["losses"] == pytest.approx(reference["losses"], abs=2e-4)


def test_outside_of_megatron_there_is_still_no_cuda(facts: Facts) -> None:
    for rank in facts["shim"]:
        assert rank == {"installs_again": True, "device_refused": True, "tensor_refused": True, "factory_refused": True}


def test_a_model_that_is_not_its_config_is_refused_by_every_rank_alike(facts: Facts) -> None:
    first, second = facts["misfits"]
    assert first == second
    assert first["fits"] is None
    assert "decoder.layers.4.mlp.linear_fc1.weight is on no stage" in first["layers"]
    assert "decoder.layers.3.mlp.linear_fc1.weight has no mapping" in first["fewer_layers"]
    assert "the config declares (192, 64)" in first["ffn"]
    assert "tie_word_embeddings False" in first["untied"]
    assert "(4, 2, 16), the model has (8, 4, 8)" in first["heads"]
    assert "minus one" in first["norms"]


def test_m5_sizes_stay_as_declared_while_one_ranks_parameters_are_offloaded_and_no_rank_reads_any(facts: Facts) -> None:
    for rank in facts["offloaded"]:
        assert rank["taken"] == rank["again"] > 30
        assert rank["metadata_unchanged"]
        assert rank["yielded"] == 0
        assert "offloaded or replaced" in rank["refused"]
        assert rank["named"] > 10


def test_a_peer_that_leaves_ends_the_gathering_within_its_deadline(facts: Facts) -> None:
    for fault in ("leave_early", "stay_away"):
        left_alone, left = facts[fault]
        assert left["left"]
        assert "did not take part" in left_alone["failure"]
        assert GATHER_DEADLINE_SECONDS <= left_alone["seconds"] < 5 * GATHER_DEADLINE_SECONDS


def test_ranks_that_are_out_of_step_gather_nothing_more(facts: Facts) -> None:
    """One could take another tensor's bytes for those that it waits for."""
    left_alone, left = facts["leave_early"]
    assert "did not take part" in left_alone["again"]["failure"]
    assert "left before its end" in left["again"]["failure"]
    assert max(left_alone["again"]["seconds"], left["again"]["seconds"]) < GATHER_DEADLINE_SECONDS / 2


def test_experts_that_lie_side_by_side_are_the_checkpoints_too(facts: Facts, models: Path) -> None:
    """Megatron's GroupedMLP, whose kernels need CUDA: with a loop in their place it computes what single experts do."""
    for rank in facts["grouped"]:
        assert "Grouped GEMM is not available" in rank["without_kernels"]
        assert rank["kind"] == "GroupedMLP"
        assert rank["exported"] == digests(models / GROUPED)
        assert rank["logit_difference"] <= 1e-5
