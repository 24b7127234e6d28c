"""What a fresh vLLM engine says: the other half of `--verify`, in a process of its own.

    python -m controlplane.cli.demo.reference MODEL_DIR REQUEST.json ANSWER.json

Plain vLLM, loading from disk: nothing of Weightplane's engine, transfer or plugin takes part, so that a fault
shared by both sides cannot hide. REQUEST has `prompts` (lists of token ids), `max_tokens`, `dtype`, `max_model_len`
and `kv_cache_memory_bytes`; ANSWER gets one {tokens, logprobs} for each prompt.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process: starts in seconds, and dies with this one
    "VLLM_PLUGINS": "",  # none, ours included
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def main() -> None:
    model_dir, request_file, answer_file = sys.argv[1:]
    os.environ.update(_ENVIRONMENT)
    request = json.loads(Path(request_file).read_text())
    Path(answer_file).write_text(json.dumps(_answers(model_dir, request)))


def _answers(model_dir: str, request: dict[str, Any]) -> list[dict[str, Any]]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model_dir,
        dtype=request["dtype"],
        max_model_len=request["max_model_len"],
        kv_cache_memory_bytes=request["kv_cache_memory_bytes"],
        max_num_seqs=len(request["prompts"]),
        enforce_eager=True,
        block_size=32,
        skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
    )
    sampling = SamplingParams(
        temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=True, logprobs=0, detokenize=False
    )
    prompts = [{"prompt_token_ids": p} for p in request["prompts"]]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return [_answer(output.outputs[0]) for output in outputs]


def _answer(completion: Any) -> dict[str, Any]:
    tokens = list(completion.token_ids)
    logprobs = [step[token].logprob for step, token in zip(completion.logprobs, tokens, strict=True)]
    return {"tokens": tokens, "logprobs": logprobs}


if __name__ == "__main__":
    main()
