"""vLLM loads checkpoints of models with experts under the names that our sources send, and means the same by them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.hf_models import WITH_EXPERTS, save_random

pytestmark = [pytest.mark.real, pytest.mark.slow]

TIMEOUT_SECONDS = 240
TOLERANCE = 1e-4
HEAD_32: dict[str, Any] = {"num_hidden_layers": 2, "head_dim": 32}
"""The least head size that vLLM's attention takes on a CPU."""
CHANGES = dict.fromkeys(WITH_EXPERTS, HEAD_32) | {
    "qwen2_moe": {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
}


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_a_checkpoint_with_experts_means_to_vllm_what_it_means_to_transformers(family: str, tmp_path: Path) -> None:
    directory = save_random(tmp_path / family, family, tied=False, **CHANGES[family])
    command = [sys.executable, "-m", "tests.support.vllm_logprobs", str(directory)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    assert said.returncode == 0, said.stderr[-4000:]
    assert float(said.stdout.strip().splitlines()[-1]) <= TOLERANCE
