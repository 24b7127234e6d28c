"""The container and Kubernetes files in deploy/: valid by their own schemas; what they promise of sharing and users."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema

from controlplane.config import load_values
from controlplane.coordinator.daemon import CoordinatorSettings
from controlplane.exit_codes import ExitCode
from engine_agent.daemon.settings import EngineSettings
from tests.support.eventually import eventually_blocking
from trainer_agent.agent.settings import TrainerSettings

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE = DEPLOY / "containers/compose.yaml"
SOURCES = os.pathsep.join(map(str, (DEPLOY.parent, DEPLOY.parent / "protos")))
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


def containers() -> Iterator[tuple[str, dict[str, Any]]]:
    for file in KUBERNETES:
        sets = [d for d in documents(file) if d["kind"] == "StatefulSet"]
        yield from ((f"{file.stem}: {c['name']}", c) for d in sets for c in d["spec"]["template"]["spec"]["containers"])


@pytest.mark.parametrize("container", [c for _, c in containers()], ids=[name for name, _ in containers()])
def test_each_container_has_three_probes_that_ask_grpcs_health(container: dict[str, Any]) -> None:
    """Not the open port: a hung event loop's stays open. And the command may show a certificate."""
    health = ["weightplane", "health"]
    port = {"engine-1": 7172, "trainer": 7272, "coordinator": 7070}.get(container["name"], 7171)
    asked = ["--addr", f"localhost:{port}"]
    alive = [*health, "--alive", *asked]
    if container["name"] == "trainer":  # one that stays down is not started again
        alive = ["sh", "-c", f"test -e /var/lib/weightplane/trainer-stays-down || {shlex.join(alive)}"]
    wanted = {"startupProbe": alive, "readinessProbe": [*health, *asked], "livenessProbe": alive}
    found = {name: container.get(name, {}).get("exec", {}).get("command") for name in wanted}
    assert found == wanted
    shown = {e["name"] for e in container.get("env", [])}
    assert {"WEIGHTPLANE_TLS_CA", "WEIGHTPLANE_TLS_CERT", "WEIGHTPLANE_TLS_KEY"} <= shown


def test_trainer_and_engines_of_one_node_share_memory_and_ipc() -> None:
    containers = pod_of("colocated.yaml")["containers"]  # one pod: one IPC namespace
    mounted = {c["name"]: {m["name"] for m in c["volumeMounts"] if m["mountPath"] == "/dev/shm"} for c in containers}
    assert mounted == {"engine-0": {"shm"}, "engine-1": {"shm"}, "trainer": {"shm"}}
    compose = compose_services()
    assert (compose["engine"]["ipc"], compose["trainer"]["ipc"]) == ("shareable", "service:engine")
    assert compose["engine"]["shm_size"] != "64m"


def compose_services() -> dict[str, dict[str, Any]]:
    services: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE.read_text())["services"]
    return services


def test_the_compose_specification_takes_the_compose_file() -> None:
    jsonschema.validate(yaml.safe_load(COMPOSE.read_text()), get_builtin_schema("vendor.compose-spec"))


@pytest.mark.parametrize("service", sorted(compose_services()))
def test_an_image_owns_what_its_service_mounts_a_new_volume_at(service: str) -> None:
    """Else the volume is root's, and the container's user cannot write."""
    volumes = [volume.split(":") for volume in compose_services()[service]["volumes"]]
    wanted = {target for source, target, *_ in volumes if not source.startswith(".")}
    containerfile = (DEPLOY / f"containers/{service}.Containerfile").read_text()
    homes = re.findall(r"--uid 10001 .*--home-dir (\S+)", containerfile)
    made = re.findall(r"install -d -o 10001 -g 10001 (\S+)", containerfile)
    assert wanted <= {*homes, *made}


def read_by(user: int, file: Path) -> bool:
    return subprocess.run(["cat", str(file)], user=user, group=user, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_the_compose_files_first_lines_make_keys_that_its_containers_read_and_no_other() -> None:
    head = [line[4:] for line in COMPOSE.read_text().splitlines() if line.startswith("#   ")]
    *made, up = [shlex.split(line) for line in head]
    assert up[:2] == ["docker", "compose"]
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        for command in made:
            own = [word for word in command if word != "sudo"]
            python = ["-m", "controlplane.cli.main", *own[1:]]
            does = [sys.executable, *python] if own[0] == "weightplane" else own
            subprocess.run(does, cwd=directory, env=os.environ | {"PYTHONPATH": SOURCES}, check=True, timeout=60)
        certs = Path(directory) / "deploy/containers/certs"
        named = {Path(path).name for text in compose_texts() for path in re.findall(r"/certs/([\w.]+)", text)}
        assert {"coordinator.key", "engine.key", "trainer.key", "viewer.key", "ca.pem"} <= named
        assert all(read_by(10001, certs / name) for name in named)
        assert not any(read_by(10001, certs / name) for name in ("ca.key", "admin.key"))


def compose_texts() -> Iterator[str]:
    yield from (file.read_text() for file in (COMPOSE, *(DEPLOY / "containers").glob("*.toml")))


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
