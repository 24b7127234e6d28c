"""What a started engine says of itself: `EngineFacts`, from vLLM's configuration and its workers' answers.

Promises that a capability is there only if this engine, as it was started, has it. It reads, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from controlplane.core.engine_sleep import SLEEP
from controlplane.core.engine_streaming import STREAMING
from controlplane.core.errors import EngineDied
from controlplane.core.layout import Expected
from controlplane.core.names import device_uuid
from engine_agent.engine import CUDA_IPC, DRAFT, PROCESSED_LOGPROBS, ROUTED_EXPERTS, SAMPLING_MASK, EngineFacts
from engine_agent.vllm.calls import Core
from engine_agent.vllm.checkpoint import CheckpointError, expected_of, read_checkpoint, read_model_facts
from engine_agent.vllm.likeness import likeness_of
from engine_agent.vllm.power import can_sleep

BATCH_INVARIANT = "batch_invariant"
"""The capability."""


def facts_of(
    core: Core,
    workers: Sequence[Mapping[str, Any]],
    expected: Expected,
    initial_digest: bytes | None,
    *,
    device_uuids: Sequence[str],
    pids: tuple[int, ...],
    alone: bool,
) -> EngineFacts:
    """`device_uuids`: what the settings say in place of the workers. `alone`: no other node has part of it."""
    config = core.llm.vllm_config
    found = (w["device_uuid"] or f"cpu-{core.engine_id}-{w['rank']}" for w in workers)
    uuids = tuple(device_uuid(text) for text in device_uuids or found)
    on_gpus = all(w["device_uuid"] for w in workers)
    return EngineFacts(
        world_size=len(uuids),
        device_uuids=uuids,
        vocab_size=config.model_config.get_vocab_size(),
        max_model_len=config.model_config.max_model_len,
        max_logprobs=config.model_config.max_logprobs,
        likeness=_likeness(core.llm, len(uuids)),
        max_requests=config.scheduler_config.max_num_seqs * core.cores,
        expected=expected,
        capabilities=_capabilities(core.llm, expected, alone=alone, on_gpus=on_gpus),
        pids=pids,
        initial_digest=initial_digest,
    )


def draft_of(llm: Any, model: Path, engine_id: str) -> Expected | None:
    """What an update must cover of a draft model that has a directory of its own; None if there is none."""
    speculative = llm.vllm_config.speculative_config
    config = None if speculative is None else speculative.draft_model_config
    if config is None or Path(config.model) == model:  # heads of the model's own checkpoint
        return None
    try:
        tensors = read_checkpoint(Path(config.model))
        return expected_of(tensors, read_model_facts(Path(config.model), tensors), dtype_name(config.dtype))
    except CheckpointError as e:
        raise EngineDied(engine_id, str(e)) from e


def dtype_name(dtype: object) -> str:
    """torch's name of it, as a checkpoint's configuration has it."""
    return str(dtype).removeprefix("torch.")


def _likeness(llm: Any, world_size: int) -> str:
    import vllm

    model, device = llm.vllm_config.model_config, llm.vllm_config.device_config.device_type
    invariant = [BATCH_INVARIANT] if vllm.envs.VLLM_BATCH_INVARIANT else []
    known = (vllm.__version__, device, model.dtype, model.quantization, world_size, model.max_model_len)
    return " ".join([likeness_of(*known), *invariant])


def _capabilities(llm: Any, expected: Expected, *, alone: bool, on_gpus: bool) -> frozenset[str]:
    import vllm

    cached = bool(llm.vllm_config.cache_config.enable_prefix_caching)
    alone = alone and llm.vllm_config.speculative_config is None  # bytes for others come whole
    model, aux = llm.vllm_config.model_config, llm.vllm_config.aux_output_config
    more = {
        "prefix_cache": cached,
        STREAMING: alone,
        CUDA_IPC: alone and on_gpus,
        DRAFT: expected.draft is not None,
        BATCH_INVARIANT: bool(vllm.envs.VLLM_BATCH_INVARIANT),
        SLEEP: can_sleep(llm),
        PROCESSED_LOGPROBS: model.logprobs_mode == PROCESSED_LOGPROBS,
        ROUTED_EXPERTS: bool(aux.enable_return_routed_experts),
        SAMPLING_MASK: bool(model.return_sampling_mask),
    }
    return frozenset({"staged", "rollback", *(name for name, able in more.items() if able)})
