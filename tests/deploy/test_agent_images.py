"""The engine's and the trainer's images: not root, with their base's own torch, healthy by their own check.

And what they say of the 64 MiB that container runtimes give `/dev/shm` by themselves.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from controlplane.exit_codes import ExitCode
from tests.deploy.images import AGENT_BASE, PACKAGES, Store, cannot, contained, packages_here

pytestmark = [
    pytest.mark.deploy,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(cannot()), reason=cannot()),
]
PYTHON, WEIGHTPLANE = "/opt/base/bin/python3", "/opt/base/bin/weightplane"
DEFAULT_SHM = "64m"
SERVE = """
WEIGHTPLANE coordinator 2>/dev/null & C=$!
WEIGHTPLANE engine --listen 127.0.0.1:7171 SETTINGS 2>engine.log & E=$!
until WEIGHTPLANE health --addr 127.0.0.1:7171 2>/dev/null; do
    kill -0 $E 2>/dev/null || { tail -40 engine.log; exit 1; }
    sleep 0.5
done
kill -TERM $E; wait $E; echo ended $?
kill -TERM $C; wait $C
"""
SEGMENT = """
from controlplane.core.errors import WeightplaneError
from trainer_agent.segments import create
try:
    create("a-segment", 128 << 20)
except WeightplaneError as error:
    print(f"{error.reason}: {error}")
"""


@dataclass(frozen=True)
class Image:
    """A built image, and a container of it."""

    name: str
    config: dict[str, Any]
    root: Path
    packages: Path

    def run(self, *command: str, shm: str = "") -> tuple[int, str]:
        inside = contained(self.root, *command, binds=(f"{self.packages}:{PACKAGES}",), shm=shm)
        done = subprocess.run(inside, capture_output=True, text=True, timeout=120, check=False)
        return done.returncode, done.stdout or done.stderr

    def printed(self, *command: str) -> str:
        return self.run(*command)[1].strip()


@pytest.fixture(scope="module", params=["engine", "trainer"])
def image(request: pytest.FixtureRequest, store: Store, agent_base: Path) -> Iterator[Image]:
    name = f"weightplane-{request.param}"
    store.build(name, AGENT_BASE, f"{agent_base}:{PACKAGES}:ro")
    config = json.loads(store.buildah("inspect", "--type", "image", name))["Docker"]["config"]
    with store.mounted(name) as root:
        yield Image(name, config, root, agent_base)
    store.forget(name)


@pytest.fixture(scope="module")
def agent_base(store: Store) -> Iterator[Path]:
    """The packages that it has."""
    store.make_agent_base()
    with packages_here() as packages:
        yield packages
    store.forget(AGENT_BASE)


def test_an_agents_image_says_how_it_runs_and_how_it_is_probed(image: Image) -> None:
    port = {"weightplane-engine": 7171, "weightplane-trainer": 7272}[image.name]
    assert image.config["User"] == "10001"
    assert image.config["Entrypoint"] == ["weightplane"]
    assert image.config["Healthcheck"]["Test"] == ["CMD", "weightplane", "health", "--addr", f"127.0.0.1:{port}"]
    assert list(image.config["ExposedPorts"]) == [f"{port}/tcp"]
    assert (image.root / "checkpoints").stat().st_uid == 10001  # what a new volume there will have


def test_an_agents_image_adds_nothing_that_its_base_has(image: Image) -> None:
    assert image.printed("/usr/bin/id", "-u") == "10001"
    added = {path.name for path in (image.root / "opt/base/lib/python3.11/site-packages").iterdir()}
    assert {"controlplane", "engine_agent", "trainer_agent"} <= added
    assert not {"torch", "vllm", "megatron"} & added
    where = image.printed(PYTHON, "-c", "import torch; print(torch.__version__, torch.__file__)")
    assert where.endswith(f"{PACKAGES}/torch/__init__.py")
    kind = image.name.removeprefix("weightplane-")
    assert f"Usage: weightplane {kind}" in image.printed(WEIGHTPLANE, kind, "--help")
    print(f"  {image.name}: runs as 10001, on its base's torch {where.split()[0]}")


def test_a_runtimes_64_mib_of_shared_memory_are_named_and_refused(image: Image) -> None:
    code, said = image.run(WEIGHTPLANE, "doctor", "--json", "--timeout", "1", shm=DEFAULT_SHM)
    (check,) = [c for c in json.loads(said)["checks"] if c["name"] == "shared memory"]
    assert code == ExitCode.FAILED
    assert check["verdict"] == "bad"
    assert "/dev/shm: 64 MiB" in check["found"]
    assert "a container's default" in check["found"]
    assert "--shm-size" in check["advice"]
    _, refused = image.run(PYTHON, "-c", SEGMENT, shm=DEFAULT_SHM)
    assert refused.startswith("LIMIT_EXCEEDED:"), refused
    print(f"  {image.name}: {check['found']}; {refused.strip()}")


@pytest.mark.parametrize("image", ["engine"], indirect=True)
def test_an_engine_in_the_image_is_healthy_by_its_own_check_and_ends_in_order(image: Image) -> None:
    """An in-memory engine: the agent, its port, the check and the stop are the image's; vLLM is not started."""
    settings = "--set engine_id=e-0 --set backend=memory --set initial=serve"
    script = SERVE.replace("WEIGHTPLANE", WEIGHTPLANE).replace("SETTINGS", settings)
    _, said = image.run("/bin/sh", "-c", script)
    words = [word for word in said.split() if word != "NOT_SERVING"]
    assert words == ["SERVING", "ended", "0"], said
    print(f"  {image.name}: an engine was SERVING by `weightplane health`, and ended in order")
