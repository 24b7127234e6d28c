"""The text of `EngineFacts.likeness` for vLLM, in this process or behind a server: engines of one text are compared."""

from __future__ import annotations


def likeness_of(
    vllm_version: str, device: object, dtype: object, quantization: object, world_size: int, max_model_len: int
) -> str:
    """What may change an answer beside the weights. The model directory is not in it: all of it is overwritten.

    `dtype` is torch's, or its text; `quantization` vLLM's name of it, or None.
    """
    return f"vllm {vllm_version} {device} {dtype} {quantization} {world_size} {max_model_len}"
