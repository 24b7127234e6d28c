"""What the first rank tells the others, over a real gloo group: the same on all of them, and never a pickle."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.ports import free_port
from trainer_agent import first_rank

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Sample:
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    engine: str


@dataclass(frozen=True)
class Scored:
    sample: Sample
    reward: float


SAMPLES = [[Scored(Sample((1, 2, 3), (-0.1, -1e-17, -1 / 3), "engine-ü"), 0.1 + 0.2)], []]


class _Touch:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (Path(self.path),))


def _rank(what: str, path: str) -> None:
    """One of two; prints what it was told."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        if what == "samples":
            told = first_rank.from_first(list[list[Scored]], lambda: SAMPLES)
            print(json.dumps(told == SAMPLES))
            first_rank.MAX_BYTES = 10
            first_rank.from_first(str, lambda: "x" * 20)
        elif dist.get_rank() == 0:
            dist.broadcast_object_list([_Touch(path)], src=0)
        else:
            first_rank.from_first(str, str)
    except Exception as error:
        print(json.dumps(f"{type(error).__name__}: {error}"))


def ranks(what: str, path: str = "") -> list[list[Any]]:
    """Of both, what they printed."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    place["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, ROOT / "protos")))
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.integration.test_first_rank", what, path],
            stdout=subprocess.PIPE,
            env=os.environ | place | {"RANK": str(rank)},
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=120)[0].splitlines() for process in started]
    return [[json.loads(line) for line in lines] for lines in said]


def test_every_rank_is_told_the_same_to_the_last_bit_and_what_is_too_long_is_refused_by_all() -> None:
    refused = "LimitExceeded: bytes that the first rank tells the others: the limit is 10, asked for 22"
    assert ranks("samples") == [[True, refused]] * 2


def test_s1_a_pickle_in_place_of_json_is_not_loaded(tmp_path: Path) -> None:
    """As torch's own collective for objects sends it: a size, and bytes."""
    touched = tmp_path / "touched"
    _, (told,) = ranks("pickle", str(touched))
    assert told.startswith(("UnicodeDecodeError", "JSONDecodeError")), told
    assert not touched.exists()
    pickle.loads(pickle.dumps(_Touch(str(touched))))  # noqa: S301 - that it would have
    assert touched.exists()


if __name__ == "__main__":
    _rank(*sys.argv[1:])
