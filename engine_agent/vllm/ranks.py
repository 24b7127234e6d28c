"""A worker's number among all workers of its engine, whatever core it belongs to."""

from __future__ import annotations

from typing import Any


def rank_in_engine(parallel: Any) -> int:
    """`parallel`: the worker's ParallelConfig. vLLM numbers the workers of each data parallel core from 0."""
    return int(parallel.data_parallel_index * parallel.world_size + parallel.rank)
