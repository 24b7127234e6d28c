"""Images of deploy/containers, built by buildah and run by systemd-nspawn; no registry is asked.

Base images are made of the Debian that machines are made of. What an agent's base has besides (torch, vLLM, Megatron)
is this environment's own: it is mounted at the build and at the run instead of copied, since it has some GB. Everything
that a Containerfile says is done for real.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.deploy.machine import REPOSITORY, TREES, missing, tree

CONTAINERS = REPOSITORY / "deploy" / "containers"
PLAIN_BASE = "localhost/debian-python"
AGENT_BASE = "localhost/debian-torch"
PACKAGES = "/srv/packages"
"""Where an agent's base image has this environment's packages."""
NOT_THE_BASES = ("weightplane*", "_weightplane.pth", "ray", "ray-*")
"""What no base image has."""
NOT_NEEDED = ("/var/cache/apt", "/var/lib/apt/lists", "/usr/share/doc", "/usr/share/man", "/usr/share/locale")
BASE_PATH = "/opt/base/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def cannot() -> str:
    """What keeps images from being built here; empty: nothing."""
    return missing() or ("" if shutil.which("buildah") else "not installed: buildah")


def wheels(directory: Path) -> Path:
    """Of this checkout and all that it needs: what pip takes during a build."""
    wanted = [str(REPOSITORY), "hatchling>=1.27"]
    command = [sys.executable, "-m", "pip", "wheel", "-q", "-w", str(directory), *wanted]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return directory


@contextmanager
def packages_here() -> Iterator[Path]:
    """This environment's packages by hard links, without what no base image has."""
    here, there = Path(sysconfig.get_path("purelib")), TREES / f"packages.{os.getpid()}"
    TREES.mkdir(parents=True, exist_ok=True)
    linked = subprocess.run(["cp", "-al", str(here), str(there)], capture_output=True, timeout=120, check=False)
    if linked.returncode != 0:  # another file system
        shutil.rmtree(there, ignore_errors=True)
        subprocess.run(["cp", "-a", str(here), str(there)], check=True, timeout=300)
    for pattern in NOT_THE_BASES:
        for path in there.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    try:
        yield there
    finally:
        shutil.rmtree(there, ignore_errors=True)


@dataclass(frozen=True)
class Store:
    """buildah's images and containers, in a directory of their own."""

    directory: Path
    wheels: Path

    def buildah(self, *words: str, timeout: float = 300) -> str:
        places = ("--root", str(self.directory / "root"), "--runroot", str(self.directory / "run"))
        command = ["buildah", *places, "--storage-driver", "vfs", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
        assert done.returncode == 0, f"{words}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout.strip()

    def make_base(self) -> None:
        """Debian with Python, without what would only be copied from layer to layer: half of it."""
        base = self.buildah("from", "scratch")
        self.buildah("copy", base, str(tree()), "/")
        self.buildah("run", "--isolation", "chroot", base, "--", "rm", "-rf", *NOT_NEEDED)
        self.buildah("commit", "--rm", base, PLAIN_BASE)

    def make_agent_base(self) -> None:
        """The same with an environment that finds the mounted packages and their setuptools: torch needs a late one."""
        base = self.buildah("from", PLAIN_BASE)
        named = f"echo {PACKAGES} > /opt/base/lib/python3.11/site-packages/packages.pth"
        script = f"python3 -m venv /opt/base && /opt/base/bin/pip uninstall -q -y setuptools && {named}"
        self.buildah("run", "--isolation", "chroot", base, "--", "/bin/sh", "-c", script)
        self.buildah("config", "--env", f"PATH={BASE_PATH}", base)
        self.buildah("commit", "--rm", base, AGENT_BASE)

    def build(self, image: str, base: str, *volumes: str) -> None:
        """By its Containerfile, from this checkout."""
        containerfile = CONTAINERS / f"{image.removeprefix('weightplane-')}.Containerfile"
        mounted = [word for volume in (f"{self.wheels}:/wheels:ro", *volumes) for word in ("--volume", volume)]
        self.buildah(
            *("build", "--isolation", "chroot", "--format", "docker", "-f", str(containerfile), "-t", image),
            *("--build-arg", f"BASE={base}", "--build-arg", "PIP=--no-index --find-links=/wheels"),
            *mounted,
            str(REPOSITORY),
            timeout=600,
        )

    @contextmanager
    def mounted(self, image: str) -> Iterator[Path]:
        """A container's file system."""
        container = self.buildah("from", f"localhost/{image}")
        yield Path(self.buildah("mount", container))
        self.buildah("rm", container)

    def forget(self, image: str) -> None:
        self.buildah("rmi", "--force", image)


def contained(root: Path, *command: str, binds: tuple[str, ...] = (), shm: str = "") -> list[str]:
    """A command as the image's user, in namespaces of its own. `shm`: size of its /dev/shm."""
    return [
        *("systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--private-network", "--as-pid2"),
        *("-D", str(root), "--user=weightplane", "--chdir=/var/lib/weightplane"),
        *(f"--bind-ro={bind}" for bind in binds),
        *([f"--tmpfs=/dev/shm:mode=1777,size={shm}"] if shm else []),
        *command,
    ]
