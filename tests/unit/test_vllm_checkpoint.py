"""What a model directory says of itself, and how it is refused when it contradicts itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from controlplane.core.errors import ManifestIncomplete, ShapeMismatch
from controlplane.core.layout import DType, Layout, TensorSpec
from engine_agent.vllm.checkpoint import (
    CheckpointError,
    StoredTensor,
    expected_of,
    read_checkpoint,
    read_model_facts,
)

TENSORS = {
    "model.embed_tokens.weight": ("F32", (8, 4)),
    "model.norm.weight": ("F32", (4,)),
    "model.layers.0.rotary_emb.inv_freq": ("F32", (2,)),
    "model.counter": ("I64", ()),
}


def write_file(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]] = TENSORS) -> Path:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape) in tensors.items():
        spec = TensorSpec(name, DType[dtype], shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + spec.byte_count]}
        at += spec.byte_count
    return write_raw(path, json.dumps(header).encode(), at)


def write_raw(path: Path, header: bytes, data_bytes: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(data_bytes))
    return path


def write_config(directory: Path, **fields: Any) -> None:
    (directory / "config.json").write_text(json.dumps({"vocab_size": 8} | fields))


def spec_of(name: str, tensor: StoredTensor) -> TensorSpec:
    return TensorSpec(name, tensor.dtype, tensor.shape)


def test_a_single_file_gives_names_shapes_dtypes_and_byte_ranges(tmp_path: Path) -> None:
    file = write_file(tmp_path / "model.safetensors")
    tensors = read_checkpoint(tmp_path)
    assert {n: (t.dtype.name, t.shape) for n, t in tensors.items()} == TENSORS
    norm = tensors["model.norm.weight"]
    assert norm.offset - tensors["model.embed_tokens.weight"].offset == 8 * 4 * 4
    assert tensors["model.counter"].offset + 8 == file.stat().st_size


def test_a_sharded_directory_is_read_through_its_index(tmp_path: Path) -> None:
    write_file(tmp_path / "a.safetensors", {"x": ("F32", (2,))})
    write_file(tmp_path / "b.safetensors", {"y": ("BF16", (3,))})
    write_file(tmp_path / "not-in-the-index.safetensors", {"x": ("F32", (9,))})
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    tensors = read_checkpoint(tmp_path)
    assert {n: (t.file.name, t.shape) for n, t in tensors.items()} == {
        "x": ("a.safetensors", (2,)),
        "y": ("b.safetensors", (3,)),
    }


def _no_directory(directory: Path) -> None:
    directory.rmdir()


def _no_file(directory: Path) -> None:
    pass


def _cut_in_the_data(directory: Path) -> None:
    file = write_file(directory / "model.safetensors")
    file.write_bytes(file.read_bytes()[:-1])


def _cut_in_the_header(directory: Path) -> None:
    file = write_file(directory / "model.safetensors")
    file.write_bytes(file.read_bytes()[:40])


def _empty(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"")


def _not_json(directory: Path) -> None:
    write_raw(directory / "model.safetensors", b"{not json", 0)


def _no_object(directory: Path) -> None:
    write_raw(directory / "model.safetensors", b"[1, 2]", 0)


def _unknown_dtype(directory: Path) -> None:
    header = {"x": {"dtype": "F1", "shape": [1], "data_offsets": [0, 1]}}
    write_raw(directory / "model.safetensors", json.dumps(header).encode(), 1)


def _bytes_that_do_not_fit(directory: Path) -> None:
    header = {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}
    write_raw(directory / "model.safetensors", json.dumps(header).encode(), 8)


def _index_of_an_absent_file(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "gone.safetensors"}}))


def _index_of_an_absent_tensor(directory: Path) -> None:
    write_file(directory / "a.safetensors", {"y": ("F32", (2,))})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))


def _one_name_in_two_files(directory: Path) -> None:
    write_file(directory / "a.safetensors", {"x": ("F32", (2,))})
    write_file(directory / "b.safetensors", {"x": ("F32", (2,))})


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_no_directory, "no such directory"),
        (_no_file, "holds no safetensors file"),
        (_cut_in_the_data, "cut short"),
        (_cut_in_the_header, "cut short"),
        (_empty, "cut short"),
        (_not_json, "not JSON"),
        (_no_object, "expected a JSON object"),
        (_unknown_dtype, "not understood"),
        (_bytes_that_do_not_fit, "do not hold F32"),
        (_index_of_an_absent_file, "No such file"),
        (_index_of_an_absent_tensor, "no file holds: x"),
        (_one_name_in_two_files, "stands in a.safetensors too"),
    ],
)
def test_a_directory_that_contradicts_itself_is_refused(
    tmp_path: Path, spoil: Callable[[Path], None], says: str
) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    spoil(directory)
    with pytest.raises(CheckpointError, match=says):
        read_checkpoint(directory)


@pytest.mark.parametrize(
    ("config", "tied"),
    [
        ({"tie_word_embeddings": True}, True),
        ({"tie_word_embeddings": False}, False),
        ({"text_config": {"tie_word_embeddings": True}}, True),
        ({}, True),  # unsaid, and there is no head among the tensors
    ],
)
def test_whether_the_head_is_tied(tmp_path: Path, config: dict[str, Any], tied: bool) -> None:
    write_file(tmp_path / "model.safetensors")
    write_config(tmp_path, **config)
    assert read_model_facts(tmp_path, read_checkpoint(tmp_path)).tied is tied


def test_a_head_among_the_tensors_decides_a_tie_that_is_unsaid(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", TENSORS | {"lm_head.weight": ("F32", (8, 4))})
    write_config(tmp_path)
    assert not read_model_facts(tmp_path, read_checkpoint(tmp_path)).tied


def test_the_vocabulary_of_a_nested_text_model_is_found_and_an_absent_one_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 77}}))
    assert read_model_facts(tmp_path, {}).vocab_size == 77
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="vocab_size is None"):
        read_model_facts(tmp_path, {})


def test_a_quantized_model_has_its_methods_format(tmp_path: Path) -> None:
    write_config(tmp_path, quantization_config={"quant_method": "fp8"})
    assert read_model_facts(tmp_path, {}).format == "fp8"
    write_config(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    assert read_model_facts(tmp_path, {}).format == "fp8-block"


def expected_in(directory: Path, engine_dtype: str = "bfloat16") -> Any:
    tensors = read_checkpoint(directory)
    return tensors, expected_of(tensors, read_model_facts(directory, tensors), engine_dtype)


def test_an_update_must_cover_every_stored_tensor_but_a_tied_head_and_the_rotary_frequencies(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", TENSORS | {"lm_head.weight": ("F32", (8, 4))})
    write_config(tmp_path, tie_word_embeddings=True)
    tensors, expected = expected_in(tmp_path)
    needed = [n for n in tensors if n not in ("lm_head.weight", "model.layers.0.rotary_emb.inv_freq")]
    expected.check(Layout(tuple(spec_of(n, tensors[n]) for n in needed)))
    expected.check(Layout(tuple(spec_of(n, t) for n, t in tensors.items())))
    with pytest.raises(ManifestIncomplete):
        expected.check(Layout(tuple(spec_of(n, tensors[n]) for n in needed[:-1])))


def test_a_tied_head_that_is_sent_all_the_same_must_have_its_shape(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", TENSORS | {"lm_head.weight": ("F32", (8, 4))})
    write_config(tmp_path, tie_word_embeddings=True)
    tensors, expected = expected_in(tmp_path)
    wrong = [spec_of(n, t) for n, t in tensors.items() if n != "lm_head.weight"]
    with pytest.raises(ShapeMismatch):
        expected.check(Layout((*wrong, TensorSpec("lm_head.weight", DType.F32, (9, 4)))))


def test_floats_may_come_in_the_files_dtype_or_the_engines_and_integers_only_as_they_are(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors")
    write_config(tmp_path)
    _, expected = expected_in(tmp_path, "bfloat16")
    assert expected.dtypes["model.norm.weight"] == {DType.F32, DType.BF16}
    assert expected.dtypes["model.counter"] == {DType.I64}
