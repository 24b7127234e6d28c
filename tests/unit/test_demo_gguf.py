"""Reading a Llama out of a GGUF file, against a file written here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("gguf")
pytest.importorskip("tokenizers")

from gguf import GGUFWriter
from tokenizers import Tokenizer

from trainer_agent.demo.gguf_llama import read_llama, read_tokenizer

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN = 4, 2, 8, 32, 64
TOKENS = ["<|end|>", "a", "b", "ab", "Ġ", "1", "2"]


def interleaved(weight: Any, heads: int) -> Any:
    """As llama.cpp's converter stores query and key rows."""
    return weight.reshape(heads, 2, HEAD_DIM // 2, HIDDEN).swapaxes(1, 2).reshape(weight.shape)


def random(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, *[1] * (len(TOKENS) - 1)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{{ messages }}")
    tensors = {
        "token_embd.weight": random(len(TOKENS), HIDDEN),
        "output_norm.weight": random(HIDDEN),
        "blk.0.attn_q.weight": interleaved(random(HIDDEN, HIDDEN), HEADS),
        "blk.0.attn_k.weight": interleaved(random(KV_HEADS * HEAD_DIM, HIDDEN), KV_HEADS),
        "blk.0.ffn_down.weight": random(HIDDEN, FFN),
    }
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_tensors_have_their_hugging_face_names_and_query_and_key_rows_their_order(file: Path) -> None:
    tensors, _ = read_llama(file)
    expected = {
        "model.embed_tokens.weight": random(len(TOKENS), HIDDEN),
        "model.norm.weight": random(HIDDEN),
        "model.layers.0.self_attn.q_proj.weight": random(HIDDEN, HIDDEN),
        "model.layers.0.self_attn.k_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
        "model.layers.0.mlp.down_proj.weight": random(HIDDEN, FFN),
    }
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], torch.from_numpy(expected[name])) for name in expected)


def test_the_config_says_what_the_file_says(file: Path) -> None:
    _, config = read_llama(file)
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 100000.0}
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 2, 8)
    assert config["tie_word_embeddings"] is True


def test_the_tokenizer_merges_splits_digits_and_knows_its_special_tokens(file: Path, tmp_path: Path) -> None:
    read_tokenizer(file, tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("ab 12<|end|>").tokens == ["ab", "Ġ", "1", "2", "<|end|>"]
    assert tokenizer.decode(tokenizer.encode("ab 12<|end|>").ids) == "ab 12"
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["eos_token"] == "<|end|>"


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    writer = GGUFWriter(path, "gpt2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match="a gpt2, not a llama"):
        read_llama(path)
