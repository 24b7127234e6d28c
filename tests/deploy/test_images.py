"""The coordinator's image, built by its Containerfile and run: not root, without torch, healthy by its own check."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.images import PLAIN_BASE, Store, cannot, contained
from tests.support.eventually import eventually_blocking

pytestmark = [
    pytest.mark.deploy,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(cannot()), reason=cannot()),
]
IMAGE = "weightplane-coordinator"
WEIGHTPLANE = "/opt/weightplane/bin/weightplane"


@pytest.fixture(scope="module")
def root(store: Store) -> Iterator[Path]:
    """A container's file system."""
    store.build(IMAGE, PLAIN_BASE)
    with store.mounted(IMAGE) as root:
        yield root


def printed(root: Path, *command: str) -> str:
    done = subprocess.run(contained(root, *command), capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip() or done.stderr.strip()


def test_the_image_says_how_it_runs_and_how_it_is_probed(store: Store, root: Path) -> None:
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
