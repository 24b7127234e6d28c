"""Starts the ranks of a sweep and collects their facts, topology by topology."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.hf_models import save_random
from tests.sweep.topology import Topology

POLL_SECONDS = 0.05
SILENCE_SECONDS = 120.0
"""Longest that one topology may take; imports come on top of the first."""

Facts = list[dict[str, Any]]
"""One dict a rank."""


def make_models(directory: Path, topologies: Sequence[Topology]) -> None:
    """The checkpoints that these topologies load; those that exist are kept."""
    for topology in topologies:
        target = directory / topology.model
        if not target.exists():
            changes = {"num_hidden_layers": topology.layers, **topology.experts}
            save_random(target, topology.family, tied=topology.tied, dtype=topology.dtype, **changes)


def run(
    topologies: Sequence[Topology], directory: Path, *, logits: bool = False, hook: str = ""
) -> Iterator[tuple[Topology, Facts]]:
    """Each topology with its facts, as soon as all ranks have written them. All topologies have as many ranks.

    Raises:
        RuntimeError: a rank died, or took too long; its output is in the text.
    """
    out = directory / "facts"
    out.mkdir(parents=True)
    (directory / "topologies.json").write_text(json.dumps([t.to_json() for t in topologies]))
    extra = (["--logits"] if logits else []) + (["--hook", hook] if hook else [])
    ranks = _start(topologies[0].ranks, directory, extra)
    try:
        for number, topology in enumerate(topologies):
            yield topology, _await_facts(number, topology, ranks, directory)
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def _start(count: int, directory: Path, extra: Sequence[str]) -> list[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "tests.sweep.job", "--rendezvous", str(directory / "rendezvous")]
    command += ["--models", str(directory / "models"), "--out", str(directory / "facts")]
    command += ["--topologies", str(directory / "topologies.json"), *extra]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(count), "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONWARNINGS"] = "ignore"
    processes = []
    for rank in range(count):
        with (directory / f"rank{rank}.log").open("wb") as log:
            processes.append(
                subprocess.Popen(command, env=environment | {"RANK": str(rank)}, stdout=log, stderr=subprocess.STDOUT)
            )
    return processes


def _await_facts(number: int, topology: Topology, ranks: Sequence[subprocess.Popen[bytes]], directory: Path) -> Facts:
    files = [directory / "facts" / f"{number}.rank{rank}.json" for rank in range(len(ranks))]
    deadline = time.monotonic() + SILENCE_SECONDS
    while not all(file.exists() for file in files):
        dead = [rank for rank, process in enumerate(ranks) if process.poll() and not files[rank].exists()]
        if dead or time.monotonic() > deadline:
            logs = "\n".join((directory / f"rank{r}.log").read_text()[-2000:] for r in dead or range(len(ranks)))
            what = f"ranks {dead} ended" if dead else f"no answer in {SILENCE_SECONDS:.0f} s"
            raise RuntimeError(f"{topology.name}: {what}\n{logs}")
        time.sleep(POLL_SECONDS)
    return [json.loads(file.read_text()) for file in files]
