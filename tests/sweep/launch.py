"""Starts the ranks of a sweep and collects their facts, topology by topology."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.support.hf_models import save_random
from tests.sweep.pushes import DIRECTORY_VARIABLE, HOOK
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
    topologies: Sequence[Topology], directory: Path, *, logits: bool = False, push: bool = False, hook: str = ""
) -> Iterator[tuple[Topology, Facts]]:
    """Each topology with its facts, as soon as all ranks have written them. All topologies have as many ranks.

    With `push` each source is pushed through every transport too; see `pushes` and `receiving`.

    Raises:
        RuntimeError: a rank died, or took too long; its output is in the text.
    """
    out = directory / "facts"
    out.mkdir(parents=True)
    (directory / "topologies.json").write_text(json.dumps([t.to_json() for t in topologies]))
    hooks = [name for name in (HOOK if push else "", hook) if name]
    extra = (["--logits"] if logits else []) + [word for name in hooks for word in ("--hook", name)]
    processes = _start_ranks(topologies[0].ranks, directory, extra)
    try:
        if push:
            processes["receiving"] = _start_receiving(topologies[0].ranks, directory)
        for number, topology in enumerate(topologies):
            yield topology, _await_facts(number, topology, processes, directory)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


Processes = dict[str, subprocess.Popen[bytes]]
"""By the name of their log."""


def _start_ranks(count: int, directory: Path, extra: Sequence[str]) -> Processes:
    command = ["tests.sweep.job", "--rendezvous", str(directory / "rendezvous")]
    command += ["--models", str(directory / "models"), "--out", str(directory / "facts")]
    command += ["--topologies", str(directory / "topologies.json"), *extra]
    names = [f"rank{rank}" for rank in range(count)]
    more = {"WORLD_SIZE": str(count), DIRECTORY_VARIABLE: str(directory)}
    return {n: _start(n, command, directory, more | {"RANK": str(r)}) for r, n in enumerate(names)}


def _start_receiving(count: int, directory: Path) -> subprocess.Popen[bytes]:
    return _start(
        "receiving", ["tests.sweep.receiving", "--directory", str(directory), "--ranks", str(count)], directory
    )


def _start(
    name: str, command: Sequence[str], directory: Path, more: Mapping[str, str] = MappingProxyType({})
) -> subprocess.Popen[bytes]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore", **more}
    with (directory / f"{name}.log").open("wb") as log:
        return subprocess.Popen([sys.executable, "-m", *command], env=environment, stdout=log, stderr=subprocess.STDOUT)


def _await_facts(number: int, topology: Topology, processes: Processes, directory: Path) -> Facts:
    """What each rank wrote. A process that ends by itself has failed, unless its work was done."""
    files = {f"rank{rank}": directory / "facts" / f"{number}.rank{rank}.json" for rank in range(topology.ranks)}
    deadline = time.monotonic() + SILENCE_SECONDS
    while not all(file.exists() for file in files.values()):
        ended = [name for name, process in processes.items() if process.poll() is not None]
        dead = [name for name in ended if name not in files or not files[name].exists()]
        if dead or time.monotonic() > deadline:
            logs = "\n".join((directory / f"{name}.log").read_text()[-2000:] for name in dead or processes)
            what = f"{', '.join(dead)} ended" if dead else f"no answer in {SILENCE_SECONDS:.0f} s"
            raise RuntimeError(f"{topology.name}: {what}\n{logs}")
        time.sleep(POLL_SECONDS)
    return [json.loads(file.read_text()) for file in files.values()]
