"""The coordinator's image, built by its Containerfile and run: not root, without torch, healthy by its own check.

No registry is asked: the base image is made of the Debian that machines are made of, and pip takes wheels made here.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.machine import REPOSITORY, missing, tree
from tests.support.eventually import eventually_blocking

WHY_NOT = missing() or ("" if shutil.which("buildah") else "not installed: buildah")
pytestmark = [
    pytest.mark.deploy,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]
CONTAINERFILE = REPOSITORY / "deploy" / "containers" / "coordinator.Containerfile"
IMAGE, BASE = "weightplane-coordinator", "localhost/debian-python"
WEIGHTPLANE = "/opt/weightplane/bin/weightplane"


@dataclass(frozen=True)
class Store:
    """buildah's images and containers, in a directory of their own."""

    directory: Path

    def buildah(self, *words: str, timeout: float = 300) -> str:
        places = ("--root", str(self.directory / "root"), "--runroot", str(self.directory / "run"))
        command = ["buildah", *places, "--storage-driver", "vfs", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
        assert done.returncode == 0, f"{words}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout.strip()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """With the image built."""
    store = Store(tmp_path_factory.mktemp("images"))
    wheels = tmp_path_factory.mktemp("wheels")
    wanted = [str(REPOSITORY), "hatchling>=1.27"]
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "-w", str(wheels), *wanted], check=True, timeout=300)
    base = store.buildah("from", "scratch")
    store.buildah("copy", base, str(tree()), "/")
    store.buildah("commit", "--rm", base, BASE)
    store.buildah(
        *("build", "--isolation", "chroot", "--format", "docker", "-f", str(CONTAINERFILE), "-t", IMAGE),
        *("--build-arg", f"BASE={BASE}", "--build-arg", "PIP=--no-index --find-links=/wheels"),
        *("--volume", f"{wheels}:/wheels:ro", str(REPOSITORY)),
        timeout=600,
    )
    yield store
    shutil.rmtree(store.directory, ignore_errors=True)


@pytest.fixture(scope="module")
def root(store: Store) -> Iterator[Path]:
    """A container's file system."""
    container = store.buildah("from", f"localhost/{IMAGE}")
    yield Path(store.buildah("mount", container))
    store.buildah("umount", container)


def contained(root: Path, *command: str) -> list[str]:
    """A command as the image's user, in namespaces of its own."""
    return [
        *("systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--private-network", "--as-pid2"),
        *("-D", str(root), "--user=weightplane", "--chdir=/var/lib/weightplane"),
        *command,
    ]


def printed(root: Path, *command: str) -> str:
    done = subprocess.run(contained(root, *command), capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip() or done.stderr.strip()


def test_the_image_says_how_it_runs_and_how_it_is_probed(store: Store) -> None:
    config: dict[str, Any] = json.loads(store.buildah("inspect", "--type", "image", IMAGE))["Docker"]["config"]
    assert config["User"] == "10001"
    assert config["Entrypoint"] == ["weightplane"]
    assert config["Healthcheck"]["Test"] == ["CMD", "weightplane", "health", "--addr", "127.0.0.1:7070"]


def test_the_image_has_what_a_coordinator_needs_and_no_torch(root: Path) -> None:
    assert printed(root, "/usr/bin/id", "-u") == "10001"
    assert "Carries weights" in printed(root, WEIGHTPLANE, "--help")
    looks = "import importlib.util as i; print(i.find_spec('torch'))"
    looked = printed(root, "/opt/weightplane/bin/python", "-c", looks)
    assert looked == "None"
    size = sum(p.stat().st_size for p in (root / "opt/weightplane").rglob("*") if p.is_file() and not p.is_symlink())
    print(f"  {IMAGE}: {size / 2**20:.0f} MiB beside its base image")


def test_a_coordinator_in_the_image_is_healthy_by_its_own_check_and_ends_in_order(root: Path) -> None:
    check = f"{WEIGHTPLANE} coordinator --state-dir /var/lib/weightplane 2>/dev/null & P=$!; "
    check += f"until {WEIGHTPLANE} health --addr 127.0.0.1:7070 2>/dev/null; do sleep 0.5; done; "
    check += "kill -TERM $P; wait $P; echo ended $?"
    process = subprocess.Popen(contained(root, "/bin/sh", "-c", check), stdout=subprocess.PIPE, text=True)
    eventually_blocking(lambda: process.poll() is not None, within=60)
    assert process.stdout is not None
    said = [word for word in process.stdout.read().split() if word != "NOT_SERVING"]
    assert said == ["SERVING", "ended", "0"]
