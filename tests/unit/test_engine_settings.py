"""The engine agent's settings as a file or a command line gives them."""

from __future__ import annotations

from pathlib import Path

import pytest

from controlplane.config import ConfigError, load, parse_overrides
from controlplane.core.errors import EngineDied
from controlplane.devices import cpu_device_uuid
from engine_agent.daemon.building import new_engine
from engine_agent.daemon.settings import EngineSettings
from engine_agent.external.engine import ExternalEngine
from engine_agent.external.settings import ExternalSettings


def settings(*sets: str, file: Path | None = None) -> EngineSettings:
    return load(EngineSettings, file, parse_overrides(["engine_id=e0", *sets]))


def test_what_an_engine_is_when_nothing_is_said() -> None:
    plain = settings()
    assert (plain.initial, plain.checkpoint_root) == ("unset", None)
    assert (plain.group, plain.unit, plain.unit_size) == ("", "", 0)


def test_a_checkpoint_root_in_a_file_is_relative_to_it(tmp_path: Path) -> None:
    file = tmp_path / "engine.toml"
    file.write_text('checkpoint_root = "checkpoints"\ninitial = "serve"\n')
    read = settings(file=file)
    assert (read.checkpoint_root, read.initial) == (tmp_path / "checkpoints", "serve")


def test_a_unit_is_named_with_its_size() -> None:
    pair = settings("group=fast", "unit=pair", "unit_size=2")
    assert (pair.group, pair.unit, pair.unit_size) == ("fast", "pair", 2)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["initial=frozen"], "initial: expected one of 'unset', 'serve', got 'frozen'"),
        (["unit=pair"], "unit and unit_size go together"),
        (["unit_size=2"], "unit and unit_size go together"),
        (["unit=pair", "unit_size=-1"], "unit and unit_size go together"),
        (
            ['transports=["inline", "pigeon"]'],
            r"no transports: \['pigeon'\]; there are shared_memory, inline, broadcast",
        ),
        (['transports=["shared_memory"]'], "every engine takes inline"),
        (["backend=external", "initial=serve"], r"nobody's until an update \(INV-1\)"),
        (["external.url=http://10.0.0.1:8000", "external.model=m"], r"external: url: 10\.0\.0\.1 is not loopback"),
    ],
)
def test_what_cannot_be_meant_is_refused(words: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        settings(*words)


def test_an_external_engine_is_an_address_and_the_directory_of_its_model(tmp_path: Path) -> None:
    file = tmp_path / "engine.toml"
    file.write_text('backend = "external"\n[external]\nurl = "http://127.0.0.1:8000"\nmodel = "policy"\n')
    read = settings(file=file)
    assert read.external == ExternalSettings("http://127.0.0.1:8000", tmp_path / "policy")
    assert read.external.transfer == "weightplane"


def test_an_external_engine_without_its_address_says_what_is_missing() -> None:
    with pytest.raises(EngineDied, match=r"settings under \[external\]: url, model"):
        new_engine(settings("backend=external"), None)


def test_an_external_engine_has_the_devices_of_the_host_that_has_no_gpus() -> None:
    read = settings("backend=external", "external.url=http://localhost:1", "external.model=m", "cpu_devices=[3]")
    engine = new_engine(read, None)
    assert isinstance(engine, ExternalEngine)
    assert engine._settings.device_uuids == (str(cpu_device_uuid(3)),)
