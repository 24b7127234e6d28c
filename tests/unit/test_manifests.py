"""The container and Kubernetes files in deploy/: valid by Kubernetes' own schemas, and what they promise of sharing."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from controlplane.config import load_values
from controlplane.coordinator.daemon import CoordinatorSettings
from engine_agent.daemon.settings import EngineSettings
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


def test_trainer_and_engines_of_one_node_share_memory_and_ipc() -> None:
    pod = next(d for d in documents(DEPLOY / "kubernetes/colocated.yaml") if d["kind"] == "StatefulSet")
    containers = pod["spec"]["template"]["spec"]["containers"]  # one pod: one IPC namespace
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
