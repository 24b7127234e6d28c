"""Lets megatron-core run where there is no CUDA device: on the CPU, with gloo.

`install()` promises that tensor, sequence, pipeline, context, expert and data parallel training, Megatron's own DDP,
optimizers (also distributed and bf16), gradient clipping and `dist_checkpointing` work on the CPU. It is
scoped: only modules under `megatron.core` see it, so that vLLM or transformers in the same process still
meet the real `torch.cuda`. Where a CUDA device is present it does nothing and returns False.

It refuses a megatron-core whose code it does not know. What it changes was traced in that code:

- the name `torch` in each loaded `megatron.core` module becomes a proxy whose `cuda` answers for the CPU
  and whose factories read device "cuda" as "cpu";
- the tracker of random states keeps the CPU generator's state (unpatched, its setter does nothing, silently);
- four functions of the optimizers compare `tensor.type()` with CUDA type names: their constants become CPU names;
- `Tensor.cuda()` called from megatron.core's own code returns the tensor;
- the router's linear layer finds that there is no Transformer Engine (0.16.1 leaves that name undefined), and the
  dispatcher of tokens to experts gets its sizes as numbers, which it does only for CUDA tensors.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

KNOWN_VERSIONS = frozenset({"0.16.1"})
"""Versions of megatron-core that this shim was traced against and tested with."""

_CPU = torch.device("cpu")
_PACKAGE = "megatron.core"
_MODULES = (
    "tensor_parallel.random",
    "models.gpt",
    "models.gpt.gpt_layer_specs",
    "distributed",
    "distributed.finalize_model_grads",
    "optimizer",
    "optimizer.optimizer",
    "optimizer.clip_grads",
    "optimizer.distrib_optimizer",
    "transformer.moe.moe_utils",
    "transformer.moe.token_dispatcher",
    "pipeline_parallel.schedules",
    "pipeline_parallel.p2p_communication",
    "dist_checkpointing",
    "dist_checkpointing.strategies.torch",
    "dist_checkpointing.strategies.fully_parallel",
)
"""Imported before the proxy is put in; modules imported later are reached by another `install()`."""

_FACTORIES = (
    "tensor",
    "zeros",
    "ones",
    "empty",
    "full",
    "arange",
    "rand",
    "randn",
    "zeros_like",
    "ones_like",
    "empty_like",
)
_CPU_TYPE_NAMES = {
    "torch.cuda.FloatTensor": "torch.FloatTensor",
    "torch.cuda.HalfTensor": "torch.HalfTensor",
    "torch.cuda.BFloat16Tensor": "torch.BFloat16Tensor",
}


class UnknownMegatron(RuntimeError):
    """This megatron-core is not one that the CPU shim knows."""


def install() -> bool:
    """Make megatron-core use the CPU in this process; call it before building a model. Repeating is safe.

    Returns:
        False, with nothing changed, where a CUDA device is present; else True.

    Raises:
        UnknownMegatron: the installed megatron-core is not in `KNOWN_VERSIONS`, or its code is not as known.
    """
    if torch.cuda.is_available():
        return False
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex|apex).*")
        version = importlib.import_module(_PACKAGE).__version__
        if version not in KNOWN_VERSIONS:
            known = ", ".join(sorted(KNOWN_VERSIONS))
            raise UnknownMegatron(f"megatron-core {version} without CUDA is not supported; known: {known}")
        for name in _MODULES:
            importlib.import_module(f"{_PACKAGE}.{name}")
    _patch_once()
    _give_proxy_to_loaded_modules()
    return True


@functools.cache
def _patch_once() -> None:
    _patch_random_states()
    _patch_type_names()
    _patch_tensor_cuda()
    _patch_experts()


def _give_proxy_to_loaded_modules() -> None:
    for name, module in list(sys.modules.items()):
        inside = name == _PACKAGE or name.startswith(f"{_PACKAGE}.")
        if inside and getattr(module, "torch", None) is torch:
            module.torch = _TORCH  # type: ignore[attr-defined]


# ---- torch as megatron.core sees it -------------------------------------------------------------


class _Event:
    """A CUDA event where everything is synchronous: always reached."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: _Event) -> float:
        return 0.0


class _Stream:
    """A CUDA stream where everything is synchronous: always drained."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()


@contextlib.contextmanager
def _stream(*_: Any, **__: Any) -> Iterator[None]:
    yield


def _nothing(*_: Any, **__: Any) -> None: ...


def _zero(*_: Any, **__: Any) -> int:
    return 0


_ONE_STREAM = _Stream()
_NVTX = types.SimpleNamespace(range_push=_zero, range_pop=_zero, range=_stream, mark=_nothing)
_CUDA_ANSWERS: dict[str, Any] = {
    "current_device": lambda: _CPU,
    "set_device": _nothing,
    "device_count": _zero,
    "is_available": lambda: False,
    "synchronize": _nothing,
    "empty_cache": _nothing,
    "get_rng_state": lambda *_, **__: torch.get_rng_state(),
    "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
    "manual_seed": lambda seed: _nothing(torch.manual_seed(seed)),
    "current_stream": lambda *_, **__: _ONE_STREAM,
    "default_stream": lambda *_, **__: _ONE_STREAM,
    "Stream": _Stream,
    "Event": _Event,
    "stream": _stream,
    "memory_allocated": _zero,
    "max_memory_allocated": _zero,
    "memory_reserved": _zero,
    "nvtx": _NVTX,
    "is_current_stream_capturing": lambda: False,
}


class _Cuda(types.ModuleType):
    """`torch.cuda`, answering for the CPU; what it has no answer for is the real attribute."""

    def __getattr__(self, name: str) -> Any:
        return _CUDA_ANSWERS[name] if name in _CUDA_ANSWERS else getattr(torch.cuda, name)


class _Torch(types.ModuleType):
    """`torch`, except for `cuda` and the factories."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _is_cuda(device: Any) -> bool:
    return isinstance(device, str | torch.device) and torch.device(device).type == "cuda"


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


def _make_torch() -> types.ModuleType:
    proxy = _Torch("torch")
    proxy.__dict__["cuda"] = _Cuda("torch.cuda")
    proxy.__dict__.update({name: _on_cpu(getattr(torch, name)) for name in _FACTORIES})
    return proxy


_TORCH = _make_torch()


# ---- what a proxy can't reach -------------------------------------------------------------------


def _patch_random_states() -> None:
    random: Any = importlib.import_module(f"{_PACKAGE}.tensor_parallel.random")
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def _patch_type_names() -> None:
    optimizer: Any = importlib.import_module(f"{_PACKAGE}.optimizer.optimizer")
    distributed: Any = importlib.import_module(f"{_PACKAGE}.optimizer.distrib_optimizer")
    clip: Any = importlib.import_module(f"{_PACKAGE}.optimizer.clip_grads")
    _use_cpu_type_names(optimizer.Float16OptimizerWithFloat16Params.__init__)
    _use_cpu_type_names(distributed.DistributedOptimizer.__init__)
    _use_cpu_type_names(distributed.DistributedOptimizer._build_model_and_main_param_groups)
    _use_cpu_type_names(clip.clip_grad_by_total_norm_fp32)


def _use_cpu_type_names(function: Any) -> None:
    """Replace CUDA type names among a function's constants; without any, the code is not the one we know."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    code: types.CodeType = function.__code__
    constants = tuple(_cpu_constant(c) for c in code.co_consts)
    if constants == code.co_consts:
        raise UnknownMegatron(f"{function.__qualname__} compares with no CUDA type name; megatron-core has changed")
    function.__code__ = code.replace(co_consts=constants)


def _cpu_constant(constant: Any) -> Any:
    if isinstance(constant, tuple):
        return tuple(_cpu_constant(c) for c in constant)
    return _CPU_TYPE_NAMES.get(constant, constant) if isinstance(constant, str) else constant


def _patch_tensor_cuda() -> None:
    real: Callable[..., torch.Tensor] = torch.Tensor.cuda

    @functools.wraps(real)
    def cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return self if caller.startswith(_PACKAGE) else real(self, *args, **kwargs)

    torch.Tensor.cuda = cuda  # type: ignore[method-assign, assignment]


def _patch_experts() -> None:
    utilities: Any = importlib.import_module(f"{_PACKAGE}.transformer.moe.moe_utils")
    dispatcher: Any = importlib.import_module(f"{_PACKAGE}.transformer.moe.token_dispatcher")
    if not hasattr(utilities, "te_general_gemm"):
        utilities.te_general_gemm = None
    utilities.maybe_move_tensor_to_cpu = dispatcher.maybe_move_tensor_to_cpu = _on_the_host


def _on_the_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor
