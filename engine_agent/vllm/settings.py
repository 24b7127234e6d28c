"""How one vLLM engine is to be run. Pure values: reading them imports neither vLLM nor torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MIB = 1 << 20

OWN_ARGUMENTS = frozenset(
    {
        "model",
        "weight_transfer_config",
        "worker_extension_cls",
        "skip_tokenizer_init",
        "logprobs_mode",
        "scheduling_policy",
        "stream_interval",
        "data_parallel_size",
    }
)
"""vLLM arguments that the contract depends on: `vllm_arguments` may not name them."""


@dataclass(frozen=True)
class VllmSettings:
    """Settings of one engine. Times are in seconds, sizes in bytes."""

    model: Path
    """Directory of the model: config.json and safetensors. Its headers say what an update must cover."""
    dtype: str = "auto"
    """Element type of the weights in the engine, as vLLM names it; "auto" takes the checkpoint's."""
    max_model_len: int | None = None
    """Prompt plus generated tokens, at most. None takes the model's own limit."""
    max_num_seqs: int = 64
    """Requests in one batch of a core. One place more is made, so that the canary never waits behind kept requests."""
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    """Engine cores, each with the whole model on workers of its own: they are one engine, take a version together and
    die together, and requests are spread over them."""
    further_nodes: int = 0
    """Nodes beside the agent's, each with a member process that brings its share of the cores."""
    node_address: str = ""
    """Address of this node, which the engine's other nodes reach it by. Needed with further nodes."""
    block_size: int | None = None
    """Tokens in a KV block. None: vLLM's choice on a GPU, 32 on a CPU (128 would leave short prompts uncached)."""
    kv_cache_memory_bytes: int | None = 256 * MIB
    """KV cache of each worker. None lets vLLM measure: on a CPU that is nearly all of the machine's memory."""
    enable_prefix_caching: bool = True
    enforce_eager: bool | None = None
    """None: eager on a CPU, where compiling takes longer than it saves; compiled on a GPU."""
    batch_invariant: bool = False
    """Answers do not depend on what else is in the batch (vLLM's VLLM_BATCH_INVARIANT): slower, and on GPUs alone."""
    device_uuids: tuple[str, ...] = ()
    """One per worker, in rank order. Empty: asked of the workers on a GPU, made from the engine's id on a CPU."""
    visible_devices: tuple[str, ...] = ()
    """Numbers or UUIDs of the host's GPUs that this engine's processes may see, in worker rank order. Empty: all."""
    cpu_bind: str = "nobind"
    """Cores of the workers on a CPU: `nobind`, or one list per worker such as `0-3|4-7`. Two engines never share."""
    cpu_threads: int = 1
    """OMP threads of each process on a CPU."""
    start_timeout_seconds: float = 3600.0
    """From nothing to a loaded model, at most."""
    start_idle_seconds: float = 120.0
    """A start without a sign of life for so long (no log line, no process, no work) is given up before that."""
    call_timeout_seconds: float = 60.0
    """One round trip through the engine core, and the hand-over of tokens when generation stops."""
    install_timeout_seconds: float = 120.0
    """A whole install. Past it the outcome is unknown and the engine's processes are killed (INV-4)."""
    canary_timeout_seconds: float = 60.0
    shutdown_timeout_seconds: float = 5.0
    """For the engine's own way out, before its processes are killed. An engine has nothing that a kill would lose."""
    log_level: str = "INFO"
    load_tokenizer: bool = False
    """Load the model's tokenizer, as stop strings and the OpenAI door need it; the latter sets this by itself. Rollouts
    are token ids either way; the tokenizer's own end token then ends them too."""
    vllm_arguments: Mapping[str, Any] = field(default_factory=dict)
    """More fields of vLLM's AsyncEngineArgs, passed through; see OWN_ARGUMENTS for those that may not be set."""

    def __post_init__(self) -> None:
        taken = OWN_ARGUMENTS & self.vllm_arguments.keys()
        if taken:
            raise ValueError(f"vllm_arguments may not set {', '.join(sorted(taken))}")
        if self.data_parallel_size % (1 + self.further_nodes):
            raise ValueError(f"{self.data_parallel_size} cores cannot be shared by {1 + self.further_nodes} nodes")
        if self.further_nodes and not self.node_address:
            raise ValueError("an engine with further nodes needs node_address: its own, as they reach it")
        if self.device_uuids and not len(self.device_uuids) == len(set(self.device_uuids)) == self.world_size:
            raise ValueError(f"device_uuids must name {self.world_size} different devices")
        if min(self.cpu_threads, self.max_num_seqs, self.data_parallel_size) < 1:
            raise ValueError("cpu_threads, max_num_seqs and data_parallel_size are at least 1")

    @property
    def world_size(self) -> int:
        """Worker processes, of all cores."""
        of_a_core = self.tensor_parallel_size * int(self.vllm_arguments.get("pipeline_parallel_size", 1))
        return self.data_parallel_size * of_a_core

    @property
    def cores_each(self) -> int:
        """Engine cores of one node."""
        return self.data_parallel_size // (1 + self.further_nodes)


@dataclass(frozen=True, slots=True)
class Nodes:
    """Where the cores of an engine that spans nodes meet."""

    address: str
    """Of the agent's node."""
    port: int
    """Where vLLM's front end waits for cores."""
    first_core: int = 0
    """Number of this node's first core; 0 is the agent's."""


def engine_arguments(settings: VllmSettings, *, gpu: bool, nodes: Nodes | None = None) -> dict[str, Any]:
    """Keyword arguments of vLLM's AsyncEngineArgs."""
    arguments: dict[str, Any] = {
        "model": str(settings.model),
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs + 1,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "data_parallel_size": settings.data_parallel_size,
        "kv_cache_memory_bytes": settings.kv_cache_memory_bytes,
        "enable_prefix_caching": settings.enable_prefix_caching,
        "enforce_eager": settings.enforce_eager if settings.enforce_eager is not None else not gpu,
        "disable_log_stats": True,
        "skip_tokenizer_init": not settings.load_tokenizer,  # tokens in, tokens out
        "logprobs_mode": "processed_logprobs",  # what was sampled from, which is what a policy gradient needs
        "scheduling_policy": "priority",  # lets the canary go before kept requests; equal priorities are first come
        "scheduler_cls": "engine_agent.vllm.scheduler.canary_alone",
        "weight_transfer_config": {"backend": "weightplane"},
        "worker_extension_cls": "engine_agent.vllm.worker.WorkerExtension",
    }
    block_size = settings.block_size or (None if gpu else 32)
    if block_size is not None:
        arguments["block_size"] = block_size
    if nodes is not None:
        arguments |= {
            "data_parallel_size_local": settings.cores_each,
            "data_parallel_address": nodes.address,
            "data_parallel_rpc_port": nodes.port,
        }
        if nodes.first_core:
            arguments["data_parallel_start_rank"] = nodes.first_core
    return arguments | dict(settings.vllm_arguments)
