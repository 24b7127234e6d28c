"""Chunks as tensors inside a worker: views of the right bytes, or a refusal before any is made."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from controlplane.core.layout import DType
from engine_agent.vllm.mapping import DTYPES, MappedChunks, StagingError

DATA = torch.arange(256, dtype=torch.float32)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "chunk"
    path.write_bytes(DATA.numpy().tobytes())
    return str(path)


def test_a_tensor_is_a_view_of_its_own_bytes(file: str) -> None:
    chunks = MappedChunks([(file, 0, 512), (file, 512, 512)])
    tensor = chunks.tensor(torch.float32, (2, 3), chunk=1, offset=16)
    assert tensor.tolist() == [[132.0, 133.0, 134.0], [135.0, 136.0, 137.0]]


def test_every_dtype_of_a_layout_is_known() -> None:
    assert DTYPES.keys() == {d.name for d in DType}
    assert all(DTYPES[d.name].itemsize == d.item_bytes for d in DType)


def test_a_scalar_and_an_empty_tensor_have_their_shapes(file: str) -> None:
    chunks = MappedChunks([(file, 0, 1024)])
    assert chunks.tensor(torch.float32, (), 0, 8).item() == 2.0
    assert chunks.tensor(torch.float32, (0, 4), 0, 1024).shape == (0, 4)


def test_writing_into_a_tensor_changes_no_bytes_of_the_sender(file: str) -> None:
    """And does not end the worker, as a write to a read-only page would."""
    chunks = MappedChunks([(file, 0, 1024)])
    chunks.tensor(torch.float32, (4,), 0, 0).zero_()
    assert Path(file).read_bytes() == DATA.numpy().tobytes()


def test_memory_that_is_still_read_is_not_let_go(file: str) -> None:
    """INV-12."""
    chunks = MappedChunks([(file, 0, 1024)])
    tensor = chunks.tensor(torch.float32, (4,), 0, 0)
    with pytest.raises(BufferError):
        chunks.close()
    del tensor
    chunks.close()


@pytest.mark.parametrize(
    ("chunk", "offset", "shape", "says"),
    [
        (1, 0, (1,), "chunk 1 of 1"),
        (-1, 0, (1,), "chunk -1 of 1"),
        (0, -4, (1,), "bytes -4 to 0"),
        (0, 0, (257,), "bytes 0 to 1028"),
        (0, 1024, (1,), "bytes 1024 to 1028"),
        (0, 2, (1,), "not aligned"),
    ],
)
def test_bytes_out_of_reach_are_refused(file: str, chunk: int, offset: int, shape: tuple[int, ...], says: str) -> None:
    chunks = MappedChunks([(file, 0, 1024)])
    with pytest.raises(StagingError, match=says):
        chunks.tensor(torch.float32, shape, chunk, offset)


def test_a_file_that_is_absent_empty_or_too_short_is_refused(file: str, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    for path, byte_count, says in (
        (f"{file}-absent", 4, "No such file"),
        (str(empty), 0, "cannot be mapped"),
        (file, 1025, "are not in the file"),
    ):
        with pytest.raises(StagingError, match=says):
            MappedChunks([(path, 0, byte_count)])
