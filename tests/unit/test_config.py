"""Settings from TOML and overrides: what is taken, and what is refused in which words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NewType

import pytest

from controlplane.config import ConfigError, load, parse_overrides
from controlplane.core.errors import InvalidRequest

EngineId = NewType("EngineId", str)


class Policy(Enum):
    ALL = "all"
    QUORUM = "quorum"


@dataclass(frozen=True, slots=True)
class Inner:
    model: Path
    dtype: str = "auto"
    devices: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    block_size: int | None = None

    def __post_init__(self) -> None:
        if self.dtype == "int1":
            raise ValueError("dtype int1 is not a type of weights")


@dataclass(frozen=True, slots=True)
class Outer:
    engine_id: EngineId
    inner: Inner
    listen: str = "127.0.0.1:0"
    wait_seconds: float = 3.0
    retries: int = 2
    eager: bool = False
    policy: Policy = Policy.ALL
    mode: Literal["staged", "streaming"] = "staged"
    window: tuple[int, float] = (1, 0.5)
    labels: dict[str, str] = field(default_factory=dict)
    optional: Inner | None = None


GOOD = """
engine_id = "engine-0"
wait_seconds = 5
policy = "quorum"
window = [2, 1]
labels = { rack = "r1" }

[inner]
model = "models/tiny"
devices = ["cpu-0", "cpu-1"]
extra = { enable_lora = true, nested = { a = 1 } }
"""


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def made(text: str) -> Path:
        file = tmp_path / "engine.toml"
        file.write_text(text)
        return file

    return made


def refusal(file: Path | None, overrides: Mapping[str, Any] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(Outer, file, overrides)
    return str(caught.value).removeprefix(f"{file}: ")


def test_a_file_becomes_nested_frozen_settings(write: Any, tmp_path: Path) -> None:
    settings = load(Outer, write(GOOD))

    assert settings == Outer(
        engine_id=EngineId("engine-0"),
        inner=Inner(
            model=tmp_path / "models/tiny",
            devices=("cpu-0", "cpu-1"),
            extra={"enable_lora": True, "nested": {"a": 1}},
        ),
        wait_seconds=5.0,
        policy=Policy.QUORUM,
        window=(2, 1.0),
        labels={"rack": "r1"},
    )
    assert isinstance(settings.wait_seconds, float)


def test_overrides_go_over_the_file_field_by_field(write: Any) -> None:
    overrides = parse_overrides(
        [
            "listen=[::1]:7071",
            "inner.dtype=bfloat16",
            "inner.block_size=32",
            "inner.extra.enable_lora=false",
            "inner.extra.name=plain words",
            "eager=true",
            "retries=7",
            "wait_seconds=0.5",
            "policy=all",
            "mode=streaming",
            'inner.devices=["cpu-9"]',
            "labels.rack=7",
        ]
    )
    settings = load(Outer, write(GOOD), overrides)

    assert settings.listen == "[::1]:7071"
    assert (settings.eager, settings.retries, settings.wait_seconds) == (True, 7, 0.5)
    assert (settings.policy, settings.mode) == (Policy.ALL, "streaming")
    assert (settings.inner.dtype, settings.inner.block_size) == ("bfloat16", 32)
    assert settings.inner.devices == ("cpu-9",)
    assert settings.inner.extra == {"enable_lora": False, "name": "plain words", "nested": {"a": 1}}
    assert settings.labels == {"rack": "7"}


def test_a_path_typed_on_the_command_line_is_taken_as_it_is(write: Any) -> None:
    assert load(Outer, write(GOOD), parse_overrides(["inner.model=here"])).inner.model == Path("here")


def test_a_file_is_not_needed() -> None:
    settings = load(Outer, None, parse_overrides(["engine_id=7", "inner.model=m"]))
    assert settings.engine_id == "7"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ({"wait_secconds": 1}, "wait_secconds: unknown key; did you mean wait_seconds?"),
        ({"inner": {"modle": "m"}}, "inner.modle: unknown key; did you mean model?"),
        ({"inner": {"zzz": 1}}, "inner.zzz: unknown key; known are block_size, devices, dtype, extra, model"),
        ({"retries": "2"}, "retries: expected whole number, got '2' (text)"),
        ({"retries": True}, "retries: expected whole number, got True (true or false)"),
        ({"retries": 2.5}, "retries: expected whole number, got 2.5 (number)"),
        ({"eager": 1}, "eager: expected true or false, got 1 (whole number)"),
        ({"wait_seconds": "3 s"}, "wait_seconds: expected number, got '3 s' (text)"),
        ({"listen": 7070}, "listen: expected text, got 7070 (whole number)"),
        ({"policy": "most"}, "policy: expected one of 'all', 'quorum', got 'most' (text)"),
        ({"mode": "lazy"}, "mode: expected one of 'staged', 'streaming', got 'lazy' (text)"),
        ({"inner": {"devices": "cpu-0"}}, "inner.devices: expected list of text, got 'cpu-0' (text)"),
        ({"inner": {"devices": ["a", 1]}}, "inner.devices.1: expected text, got 1 (whole number)"),
        ({"inner": {"block_size": "big"}}, "inner.block_size: expected whole number, got 'big' (text)"),
        ({"inner": {"model": 3}}, "inner.model: expected path, got 3 (whole number)"),
        ({"inner": 3}, "inner: expected table, got 3 (whole number)"),
        ({"window": [1]}, "window: expected list of 2 values, got [1] (list)"),
        ({"labels": {"a": 1}}, "labels.a: expected text, got 1 (whole number)"),
        ({"inner": {"dtype": "int1"}}, "inner: dtype int1 is not a type of weights"),
        ({"optional": {"dtype": "auto"}}, "optional.model: is required (path)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_said_with_key_expected_and_got(write: Any, override: Mapping[str, Any], words: str) -> None:
    assert refusal(write(GOOD), override) == words


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("retries=many", "retries: expected whole number, got 'many'"),
        ("eager=yes", "eager: expected true or false, got 'yes'"),
        ("inner.devices=cpu-0", "inner.devices: expected list of text, got 'cpu-0'"),
    ],
)
def test_text_of_the_command_line_must_spell_the_settings_type(write: Any, item: str, words: str) -> None:
    assert refusal(write(GOOD), parse_overrides([item])) == words


@dataclass(frozen=True)
class Limits:
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise InvalidRequest(field="ranks", problem=f"at least 1, not {self.ranks}")


def test_a_typed_refusal_of_the_settings_is_a_config_error_too(write: Any) -> None:
    file = write("ranks = 0")
    with pytest.raises(ConfigError) as caught:
        load(Limits, file)
    assert str(caught.value) == f"{file}: ranks: at least 1, not 0"


def test_a_required_key_that_is_missing_is_named() -> None:
    assert refusal(None, {"inner": {}}) == "engine_id: is required (text)"
    assert refusal(None, {"engine_id": "e", "inner": {}}) == "inner.model: is required (path)"


def test_the_file_is_named_in_the_refusal(write: Any) -> None:
    file = write(GOOD + "typo = 1\n")
    with pytest.raises(ConfigError, match=rf"^{file}: inner\.typo: unknown key"):
        load(Outer, file)


def test_a_file_that_cannot_be_read_is_said_so(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.toml") == "cannot be read: No such file or directory"


def test_broken_toml_is_said_with_its_place(write: Any) -> None:
    assert "is not valid TOML: Expected '=' after a key" in refusal(write("a b"))


@pytest.mark.parametrize("item", ["retries", "=3", "a..b=1", ".a=1"])
def test_an_override_that_is_no_key_and_value_is_refused(item: str) -> None:
    with pytest.raises(ConfigError, match="expected KEY=VALUE"):
        parse_overrides([item])
