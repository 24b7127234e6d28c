"""MegatronSource against real Megatron: two processes over gloo, compared with the checkpoint and with transformers."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.megatron_job import GATHER_DEADLINE_SECONDS, Case
from trainer_agent.demo.models import random_model

pytestmark = pytest.mark.real

JOB_TIMEOUT_SECONDS = 240
SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "hidden_act": "silu",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama-untied": {"model_type": "llama", "tie_word_embeddings": False, "vocab_size": 250},
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True, "head_dim": 16, "vocab_size": 251},
    "qwen2-untied": {"model_type": "qwen2", "tie_word_embeddings": False, "head_dim": 16},
    "qwen3-untied": {"model_type": "qwen3", "tie_word_embeddings": False},
    "llama-bf16": {"model_type": "llama", "tie_word_embeddings": True},
}
DENSE = ["llama-tied", "llama-untied", "qwen2-tied", "qwen2-untied", "qwen3-untied"]
CASES = [
    *[Case(model, tensor_parallel=2) for model in DENSE],
    *[Case(model, pipeline_parallel=2) for model in DENSE],
    Case("llama-bf16", dtype="bfloat16", tensor_parallel=2),
    Case("llama-bf16", dtype="bfloat16", pipeline_parallel=2),
    Case("llama-untied", tensor_parallel=2, vocab_multiple=64, sequence_parallel=True),
    Case("llama-tied", pipeline_parallel=2, virtual_pipeline=2),
    Case("llama-tied", distributed_optimizer=True),
]
TRAINED = [case for case in CASES if case.virtual_pipeline == 1]
FLOAT32 = [case for case in TRAINED if case.dtype == "float32"]
REFERENCES = [Case(model) for model in DENSE]

Facts = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name, changes in MODELS.items():
        dtype = torch.bfloat16 if name.endswith("bf16") else torch.float32
        random_model(root / name, SMALL | changes, seed=11, dtype=dtype)
    return root


def run_job(world: int, models: Path, out: Path, cases: Sequence[Case], *extra: str) -> Facts:
    """Each case's facts, one dict a rank."""
    out.mkdir()
    command = [sys.executable, "-m", "tests.support.megatron_job", "--rendezvous", str(out / "rendezvous")]
    command += ["--models", str(models), "--out", str(out), "--cases", json.dumps([asdict(c) for c in cases]), *extra]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(world), "CUDA_VISIBLE_DEVICES": ""}
    ranks = [
        subprocess.Popen(
            command, env=environment | {"RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for rank in range(world)
    ]
    try:
        outputs = [rank.communicate(timeout=JOB_TIMEOUT_SECONDS)[0].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(outputs)
    names = ["shim", *[case.name for case in cases]] + (["misfits", "leave-early"] if extra else [])
    return {n: [json.loads((out / f"{n}.rank{r}.json").read_text()) for r in range(world)] for n in names}


@pytest.fixture(scope="module")
def facts(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Facts:
    return run_job(2, models, tmp_path_factory.mktemp("two") / "out", CASES, "--misfits")


@pytest.fixture(scope="module")
def alone(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Facts:
    return run_job(1, models, tmp_path_factory.mktemp("one") / "out", REFERENCES)


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
    tied = MODELS[case.model]["tie_word_embeddings"]
    for rank in facts[case.name]:
        assert rank["ties"] == ([["lm_head.weight", "model.embed_tokens.weight"]] if tied else [])
        assert ("lm_head.weight" in rank["loaded"]) is not tied


@pytest.mark.parametrize("case", TRAINED, ids=ids(TRAINED))
def test_every_tensor_changes_in_training_and_every_rank_exports_the_same(case: Case, facts: Facts) -> None:
    first, second = facts[case.name]
    assert first["trained"] == second["trained"]
    unchanged = [name for name, digest in first["trained"].items() if digest == first["loaded"][name]]
    assert unchanged == []


@pytest.mark.parametrize("case", TRAINED, ids=ids(TRAINED))
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
    assert "minus one" in first["norms"]


def test_a_peer_that_leaves_ends_the_gathering_within_its_deadline(facts: Facts) -> None:
    left_alone, left = facts["leave-early"]
    assert left == {"left": True}
    assert "a peer did not take part" in left_alone["failure"]
    assert GATHER_DEADLINE_SECONDS <= left_alone["seconds"] < 5 * GATHER_DEADLINE_SECONDS
