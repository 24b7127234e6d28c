"""A machine with systemd as PID 1 (systemd-nspawn over a debootstrap tree) that has this checkout read-only.

Promises a fresh root for each machine, a network of its own (loopback only), and nothing left of it afterwards. Refuses
to run where `missing()` names something.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sysconfig
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.eventually import eventually_blocking

REPOSITORY = Path(__file__).parents[2]
TREES = REPOSITORY / "build" / "deploy"
"""Where the tree that machines are copied from is kept: a debootstrap takes a minute."""
SUITE = "bookworm"
"""Debian 12: its Python is 3.11, as this checkout's."""
PACKAGES = "systemd,systemd-sysv,dbus,python3,python3-venv,procps"
BOOT_SECONDS = 90.0
PROGRAM = """#!/bin/sh
export PYTHONPATH=/srv/weightplane:/srv/weightplane/protos:/srv/site-packages PYTHONDONTWRITEBYTECODE=1
exec /usr/bin/python3 -m controlplane.cli.main "$@"
"""


def missing() -> str:
    """What keeps machines from running here; empty: nothing."""
    if os.geteuid() != 0:
        return "machines need root"
    lacks = [name for name in ("systemd-nspawn", "debootstrap", "nsenter") if shutil.which(name) is None]
    return f"not installed: {', '.join(lacks)} (Debian: systemd-container, debootstrap)" if lacks else ""


def tree() -> Path:
    """A Debian with systemd and Python; made once."""
    made = TREES / f"{SUITE}-{PACKAGES.replace(',', '-')}"
    if not made.exists():
        scratch = made.with_name(f"{made.name}.{os.getpid()}")
        TREES.mkdir(parents=True, exist_ok=True)
        command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(scratch)]
        subprocess.run(command, check=True, timeout=540, stdout=subprocess.DEVNULL)
        scratch.rename(made)
    return made


@dataclass(frozen=True)
class Machine:
    """A booted machine."""

    root: Path
    nspawn: subprocess.Popen[bytes]

    def run(self, *command: str, timeout: float = 60.0, check: bool = True) -> str:
        """What a command prints, as root in the machine."""
        inside = self._inside(*command)
        done = subprocess.run(inside, capture_output=True, text=True, timeout=timeout, check=False)
        assert not check or done.returncode == 0, f"{command}: {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Its stdout is the caller's to read; what it says else is nobody's."""
        quiet = subprocess.DEVNULL
        return subprocess.Popen(self._inside(*command), stdout=subprocess.PIPE, stderr=quiet, text=True)

    def power_off(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._leader(), signal.SIGRTMIN + 4)  # systemd's word for it

    def _inside(self, *command: str) -> list[str]:
        spaces = ("--mount", "--uts", "--ipc", "--net", "--pid")
        return ["nsenter", "-t", str(self._leader()), *spaces, "--", *command]

    def _leader(self) -> int:
        """Process id of its PID 1, here. While it boots other children of systemd-nspawn come and go."""
        children = Path(f"/proc/{self.nspawn.pid}/task/{self.nspawn.pid}/children").read_text().split()
        assert children, "the machine is not there; see console.log"
        return int(children[0])

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(mode)

    def show(self, unit: str, *properties: str) -> dict[str, str]:
        """What systemd says of a unit."""
        said = self.run("systemctl", "show", unit, *(f"--property={name}" for name in properties))
        return dict(line.split("=", 1) for line in said.splitlines())


@contextmanager
def booted(directory: Path) -> Iterator[Machine]:
    """A machine of its own. /opt/weightplane/bin/weightplane runs this checkout; there is a user `weightplane`."""
    root = directory / "root"
    subprocess.run(["cp", "-a", "--reflink=auto", str(tree()), str(root)], check=True, timeout=120)
    (root / "etc/machine-id").write_text(f"{uuid.uuid4().hex}\n")  # without one systemd enables all units
    (root / "etc/hostname").write_text("machine\n")
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n::1 localhost\n")
    for waits in ("systemd-networkd-wait-online", "ifupdown-wait-online"):  # for a link that no machine here has
        (root / f"etc/systemd/system/{waits}.service").symlink_to("/dev/null")
    binds = {REPOSITORY: "/srv/weightplane", Path(sysconfig.get_path("purelib")): "/srv/site-packages"}
    with (directory / "console.log").open("w") as console:
        nspawn = subprocess.Popen(
            [
                *("systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--boot", "--private-network"),
                *(f"--machine=wp-{os.getpid()}", "-D", str(root)),
                *(f"--bind-ro={here}:{there}" for here, there in binds.items()),
            ],
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
        )
    machine = Machine(root, nspawn)
    try:
        eventually_blocking(lambda: _is_up(machine), within=BOOT_SECONDS)
        machine.write("/opt/weightplane/bin/weightplane", PROGRAM, 0o755)
        machine.run("useradd", "--system", "--no-create-home", "weightplane")
        yield machine
    finally:
        _end(machine)
        shutil.rmtree(root, ignore_errors=True)


def _is_up(machine: Machine) -> bool:
    return machine.run("systemctl", "is-system-running", check=False) in ("running", "degraded")


def _end(machine: Machine) -> None:
    if machine.nspawn.poll() is None:
        with contextlib.suppress(AssertionError, OSError):
            machine.power_off()
    try:
        machine.nspawn.wait(30)
    except subprocess.TimeoutExpired:
        machine.nspawn.kill()
        machine.nspawn.wait()
