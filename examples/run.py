"""Run an example on this machine, from nothing to its last line: make the model, start a fleet, train, end everything.

    python -m examples.run sync_grpo|async_grpo|distill|megatron_loop [--model tiny|smollm2] [options of the example]

It does what you would type: `weightplane up fleet.toml` with the file that it wrote, and when the engines run
`weightplane trainer -- -m examples.NAME`. `--keep DIR` keeps that file and the logs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from controlplane.cli.ask import get_fleet
from controlplane.cli.demo.settings import default_cache_dir
from controlplane.cli.ending import CommandFailed
from controlplane.processes import set_death_signal
from weightplane.v1 import engine_pb2

NAMES = ("sync_grpo", "async_grpo", "distill", "megatron_loop")
RANKS = 2
START_SECONDS = 300.0
STOP_SECONDS = 60.0
QUIET_MATHS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
"""Spinning threads of one process make another's small operations many times slower."""
FEWER_WARNINGS = {"PYTHONWARNINGS": "ignore::UserWarning"}
"""Megatron says on each rank, many times, what is not installed on a CPU."""

FLEET = """\
run_id = "example"
address = "{address}"
state_dir = "state"
[coordinator]
update_mode = "rolling"             # engines take a version one after the other; some always generate
[vllm]
model = "{model}"
dtype = "float32"                   # a CPU's own
max_model_len = 256
max_num_seqs = 32
kv_cache_memory_bytes = 67108864
cpu_bind = "nobind"
[[groups]]
name = "policy"
count = {engines}
devices = {devices}
"""
TEACHER = """\
[[groups]]
name = "teacher"                    # serves what it loads, as number 0, and is never updated
model = "teacher"
role = "frozen"
vllm.model = "{teacher}"
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--model", choices=["tiny", "smollm2"], default="tiny")
    parser.add_argument("--listen", default="127.0.0.1:7070", help="where the coordinator serves")
    parser.add_argument("--keep", type=Path, help="work in this directory, and keep it")
    parser.add_argument("--cache", type=Path, default=default_cache_dir(), help="where models are kept")
    options, rest = parser.parse_known_args(argv)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with ExitStack() as stack:
        work = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weightplane-example-")))
        work, cache = work.absolute(), options.cache.absolute()
        work.mkdir(parents=True, exist_ok=True)
        model = fetch(work, options.model, cache, seed=0)
        file = work / "fleet.toml"
        teacher = fetch(work, "tiny", cache, seed=1) if options.name == "distill" else None
        file.write_text(fleet_toml(options.name, options.listen, model, teacher))
        stack.enter_context(fleet(file, options.listen))
        words = ["--coordinator", options.listen, "--set", f"nproc_per_node={RANKS}", "--set", "max_restarts=0"]
        script = ["--", "-m", f"examples.{options.name}", "--model-dir", str(model), *rest]
        words += ["--log-level", "WARNING", "--die-with-parent", str(os.getpid())]
        return stack.enter_context(weightplane("trainer", *words, *script)).wait()


def fleet_toml(name: str, address: str, model: Path, teacher: Path | None) -> str:
    """Two engines of the policy; for distillation one, and one of the teacher."""
    if name != "distill":
        return FLEET.format(address=address, model=model, engines=2, devices=[0, 1])
    return FLEET.format(address=address, model=model, engines=1, devices=[0]) + TEACHER.format(teacher=teacher)


def fetch(work: Path, name: str, cache: Path, seed: int) -> Path:
    """Make a model's directory, in a process of its own: torch's memory is gone afterwards."""
    told = work / f"{name}-{seed}.path"
    words = [name, str(cache), str(seed), str(told)]
    if subprocess.run([sys.executable, "-m", "controlplane.cli.demo.fetch_model", *words], check=False).returncode:
        raise SystemExit(1)  # it said why
    return Path(told.read_text())


@contextmanager
def weightplane(*words: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A command of ours, in a session of its own: Ctrl-C reaches this process alone, which then ends it in order."""
    command = [sys.executable, "-m", "controlplane.cli.main", *words]
    process = subprocess.Popen(
        command, env=os.environ | QUIET_MATHS | FEWER_WARNINGS, start_new_session=True, **options
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(STOP_SECONDS)


@contextmanager
def fleet(file: Path, address: str) -> Iterator[None]:
    """Every process of a fleet file, from when its engines run; at the end all of them are ended."""
    started = time.monotonic()
    # It ends when this process does, however that comes about. Nothing here speaks gRPC before the fork.
    options = {"stderr": subprocess.DEVNULL, "preexec_fn": lambda: set_death_signal(signal.SIGTERM)}
    with weightplane("up", str(file), **options) as up:
        print(f"starting a fleet at {address}; logs: {file.parent}/state/logs", flush=True)
        while not running(address):
            if up.poll() is not None or time.monotonic() > started + START_SECONDS:
                raise SystemExit(f"the fleet did not start within {START_SECONDS:.0f} s; see its logs")
            time.sleep(0.5)
        print(f"its engines run after {time.monotonic() - started:.0f} s", flush=True)
        yield


def running(address: str) -> bool:
    """All engines of the fleet are up. Of those that have not said anything yet the coordinator does not know."""
    try:
        view = asyncio.run(get_fleet(address, timeout=5.0))
    except CommandFailed:
        return False
    lives = [e.status.life for e in view.engines if e.known]
    return len(lives) == 2 and all(life == engine_pb2.ENGINE_LIFE_RUNNING for life in lives)


if __name__ == "__main__":
    sys.exit(main())
