"""A fresh vLLM engine, in a process of its own, loads a directory of `hf_models` and says how likely its tokens are.

    python -m tests.support.vllm_logprobs DIRECTORY

Prints the largest difference of a prompt token's log probability from transformers', as the last line.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.support.hf_models import LENGTH, logits_of_transformers

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def main() -> None:
    os.environ.update(ENVIRONMENT)
    from vllm import LLM, SamplingParams

    directory = Path(sys.argv[1])
    reference = logits_of_transformers(directory)
    tokens = reference["tokens"][0].tolist()
    engine = LLM(
        model=str(directory),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=2 * LENGTH,
        max_num_seqs=1,
        kv_cache_memory_bytes=32 << 20,
        block_size=32,
    )
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=1, detokenize=False)
    (answer,) = engine.generate({"prompt_token_ids": tokens}, sampling, use_tqdm=False)
    expected = reference["logits"][0].log_softmax(-1)
    said = [position[token].logprob for token, position in zip(tokens[1:], answer.prompt_logprobs[1:], strict=True)]
    print(max(abs(s - float(expected[i, token])) for i, (token, s) in enumerate(zip(tokens[1:], said, strict=True))))


if __name__ == "__main__":
    main()
