"""The container and Kubernetes files in deploy/: valid by Kubernetes' own schemas, and what they promise of sharing."""

from __future__ import annotations

import os
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from controlplane.config import load_values
from controlplane.coordinator.daemon import CoordinatorSettings
from controlplane.exit_codes import ExitCode
from engine_agent.daemon.settings import EngineSettings
from tests.support.eventually import eventually_blocking
from trainer_agent.agent.settings import TrainerSettings

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
SETTINGS: dict[str, type[Any]] = {
    "coordinator.toml": CoordinatorSettings,
    "engine.toml": EngineSettings,
    "trainer.toml": TrainerSettings,
}
GIVEN = {"engine.toml": {"engine_id": "engine-0"}}
"""What the command line adds to a file."""


def documents(file: Path) -> Iterator[dict[str, Any]]:
    yield from yaml.safe_load_all(file.read_text())


@pytest.mark.parametrize("file", KUBERNETES, ids=lambda p: p.name)
def test_kubernetes_takes_the_manifests(file: Path) -> None:
    for document in documents(file):
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("file", KUBERNETES, ids=lambda p: p.name)
def test_no_container_is_root_or_may_become_it(file: Path) -> None:
    for document in documents(file):
        if document["kind"] != "StatefulSet":
            continue
        pod = document["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert not [c["name"] for c in pod["containers"] if c["securityContext"]["allowPrivilegeEscalation"]]


def pod_of(name: str) -> dict[str, Any]:
    """What a StatefulSet of that file runs."""
    document = next(d for d in documents(DEPLOY / "kubernetes" / name) if d["kind"] == "StatefulSet")
    spec: dict[str, Any] = document["spec"]["template"]["spec"]
    return spec


def test_trainer_and_engines_of_one_node_share_memory_and_ipc() -> None:
    containers = pod_of("colocated.yaml")["containers"]  # one pod: one IPC namespace
    mounted = {c["name"]: {m["name"] for m in c["volumeMounts"] if m["mountPath"] == "/dev/shm"} for c in containers}
    assert mounted == {"engine-0": {"shm"}, "engine-1": {"shm"}, "trainer": {"shm"}}
    compose = yaml.safe_load((DEPLOY / "containers/compose.yaml").read_text())["services"]
    assert (compose["engine"]["ipc"], compose["trainer"]["ipc"]) == ("shareable", "service:engine")
    assert compose["engine"]["shm_size"] != "64m"


def settings_texts() -> Iterator[tuple[str, str, str]]:
    for file in sorted((DEPLOY / "containers").glob("*.toml")):
        yield file.name, file.name, file.read_text()
    for file in KUBERNETES:
        for document in documents(file):
            if document["kind"] == "ConfigMap":
                yield from ((f"{file.name}: {name}", name, text) for name, text in document["data"].items())


@pytest.mark.parametrize(("name", "text"), [s[1:] for s in settings_texts()], ids=[s[0] for s in settings_texts()])
def test_every_daemon_takes_the_settings_that_the_manifests_give_it(name: str, text: str) -> None:
    load_values(SETTINGS[name], tomllib.loads(text) | GIVEN.get(name, {}), source=name)


# ---- a fenced trainer stays down (INV-7) ----

AGENT = """#!/bin/sh
echo started >> {told}
trap 'echo stopped >> {told}; exit 130' TERM
[ {code} != stays ] || {{ sleep 100 & wait; }}
exit {code}
"""
"""In place of the trainer agent: it ends with a code, or stays until it is told to end."""


class Container:
    """The trainer's, with the manifest's own command, as often as Kubernetes starts it; its state outlives it."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._told = directory, directory / "told"
        (directory / "bin").mkdir()
        (directory / "state").mkdir()

    def start(self, code: str) -> subprocess.Popen[str]:
        """The agent in it ends with `code`."""
        agent = self._directory / "bin/weightplane"
        agent.write_text(AGENT.format(told=self._told, code=code))
        agent.chmod(0o755)
        trainer = next(c for c in pod_of("colocated.yaml")["containers"] if c["name"] == "trainer")
        state = str(self._directory / "state")
        words = [word.replace("/var/lib/weightplane", state) for word in trainer["command"] + trainer["args"]]
        environment = os.environ | {"PATH": f"{agent.parent}:{os.environ['PATH']}"}
        return subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True)

    @property
    def told(self) -> list[str]:
        return self._told.read_text().split() if self._told.exists() else []


def stays_down(process: subprocess.Popen[str]) -> None:
    """It says that it does, and does until it is told to end."""
    assert process.stderr is not None
    assert "is not started again" in process.stderr.readline()
    assert process.poll() is None
    process.terminate()
    assert process.wait(60) == 0
    process.stderr.close()


@pytest.mark.parametrize("code", ["66", "67"])
def test_inv7_kubernetes_does_not_start_a_fenced_trainer_again(tmp_path: Path, code: str) -> None:
    container = Container(tmp_path)
    stays_down(container.start(code))
    stays_down(container.start("0"))  # the container is started again, by a probe, say
    assert container.told == ["started"]


@pytest.mark.parametrize("code", ["0", "64", "70"])
def test_what_else_a_trainer_ends_with_is_for_kubernetes_to_judge(tmp_path: Path, code: str) -> None:
    container = Container(tmp_path)
    for _ in range(2):
        with container.start(code) as process:
            assert process.wait(60) == int(code)
    assert container.told == ["started", "started"]


def test_a_pod_that_ends_tells_the_trainer_which_ends_in_order(tmp_path: Path) -> None:
    container = Container(tmp_path)
    with container.start("stays") as process:
        eventually_blocking(lambda: container.told == ["started"])
        process.terminate()
        assert process.wait(60) == ExitCode.INTERRUPTED
    assert container.told == ["started", "stopped"]
