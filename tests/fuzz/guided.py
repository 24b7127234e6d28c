"""Coverage-guided fuzzing of what reads messages: `python -m tests.fuzz.guided [--runs 20000] [--seed 1]`.

For each of the five services libFuzzer (atheris) changes messages so as to reach more of the validator and of the
codecs, for so many runs. Anything but a refusal of the contract ends it, with the bytes, and exit code 1. Without
atheris (extra `fuzz`) it says so and ends with 0.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

RUNS = 20_000
"""Of each service."""
LIMIT_SECONDS = 300
MAX_BYTES = 4096
SEEDS = 40
"""Messages of each RPC to begin with."""
SHOWN = re.compile(rb"#(\d+)\s+DONE\s+cov: (\d+) ft: (\d+) corp: (\d+)/")
HERE = "tests.fuzz.guided"


def main() -> int:
    parser = argparse.ArgumentParser(prog=HERE, description="Fuzz what reads messages, guided by coverage.")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--service", help="in this process, with its corpus")
    parser.add_argument("--corpus", type=Path)
    asked = parser.parse_args()
    if find_spec("atheris") is None:
        print("skipped: coverage-guided fuzzing needs atheris (pip install 'weightplane[fuzz]')")
        return 0
    if asked.service:
        _fuzz(asked.service, asked.runs, asked.seed, asked.corpus)
    from tests.fuzz.readers import SERVICES

    with tempfile.TemporaryDirectory(prefix="weightplane-guided-") as directory:
        found = [_one(service, asked.runs, asked.seed, Path(directory) / service) for service in SERVICES]
    return 0 if all(found) else 1


def _one(service: str, runs: int, seed: int, corpus: Path) -> bool:
    """In a process of its own: libFuzzer ends the process that it runs in."""
    corpus.mkdir()
    _sow(service, seed, corpus)
    command = [sys.executable, "-m", HERE, "--service", service, "--runs", str(runs), "--seed", str(seed)]
    done = subprocess.run([*command, "--corpus", str(corpus)], capture_output=True, cwd=Path(__file__).parents[2])
    shown = SHOWN.search(done.stderr)
    if done.returncode or shown is None:
        print(f"WRONG {service}: exit code {done.returncode}\n{done.stderr.decode(errors='replace')[-3000:]}")
        return False
    count, covered, features, kept = (int(number) for number in shown.groups())
    print(f"{service}: {count} messages, {covered} branches reached, {features} features, {kept} kept")
    return True


def _sow(service: str, seed: int, corpus: Path) -> None:
    """Messages such as `make fuzz` sends. The first byte says which RPC they are for."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded
    from hypothesis import strategies as st

    from tests.fuzz.messages import Texts, calls
    from tests.fuzz.readers import honest, rpcs

    every = [rpc.descriptor.input_type for rpc in rpcs(service)]
    for at, message in enumerate(m for name, m in honest() if name == service):
        (corpus / f"honest-{at}").write_bytes(bytes([every.index(message.DESCRIPTOR)]) + message.SerializeToString())
    drawn = [calls(d, every, Texts({"run_id": "r", "engine_id": "e0"}), False) for d in every]

    @seeded(seed)
    @settings(
        max_examples=SEEDS * len(drawn),
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, len(drawn) - 1).flatmap(lambda i: drawn[i].map(lambda frames: (i, frames[0]))))
    def sow(one: tuple[int, bytes]) -> None:
        index, data = one
        if len(data) < MAX_BYTES:
            (corpus / f"{len(list(corpus.iterdir()))}").write_bytes(bytes([index]) + data)

    sow()


def _fuzz(service: str, runs: int, seed: int, corpus: Path) -> None:
    """Does not return."""
    import atheris

    with atheris.instrument_imports(include=["controlplane", "engine_agent"]):
        from controlplane.core.errors import WeightplaneError
        from tests.fuzz.readers import read, rpcs
    from google.protobuf.message import DecodeError

    all_of_it = rpcs(service)

    def one(data: bytes) -> None:
        if not data:
            return
        with suppress(DecodeError, WeightplaneError):
            read(all_of_it[data[0] % len(all_of_it)], data[1:])

    limits = [f"-runs={runs}", f"-seed={seed}", f"-max_len={MAX_BYTES}", f"-max_total_time={LIMIT_SECONDS}"]
    atheris.Setup(["guided", *limits, f"-artifact_prefix={corpus.parent}/", "-print_final_stats=1", str(corpus)], one)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
