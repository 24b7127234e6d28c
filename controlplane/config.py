"""Settings from a TOML file and overrides, into frozen dataclasses.

The dataclass is the schema: its fields, their types and defaults, and what its `__post_init__` refuses. Promises
that nothing is dropped or converted in silence: an unknown key is refused with the nearest name, a wrong type with
key, expected and got. Durations and sizes are plain numbers whose unit is in the name. Knows nothing of who uses it.

Types understood: bool, int, float, str, Path, Enum, Literal, NewType, X | None, tuple, list, dict (or Mapping) with
text keys, Any, and dataclasses of these. A relative Path in a file is relative to that file.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NewType, TypeVar, Union, get_args, get_origin

from controlplane.core.errors import WeightplaneError

T = TypeVar("T")
Settings = Mapping[str, Any]


class ConfigError(ValueError):
    """What is wrong with the settings, in one line: the key, what was expected, what was found."""

    def __init__(self, key: str, problem: str, source: str = "") -> None:
        super().__init__(": ".join(part for part in (source, key, problem) if part))
        self.key = key
        self.problem = problem


class Text(str):
    """A value typed on a command line: what it means depends on the type that the setting has."""

    __slots__ = ()


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """Where a value stands: its key, and the directory that relative paths start from."""

    key: str
    base: Path

    def inside(self, name: str) -> _Place:
        return _Place(f"{self.key}.{name}" if self.key else name, self.base)


def load(cls: type[T], file: Path | None = None, overrides: Settings | None = None) -> T:
    """An instance of the dataclass `cls` from `file`, with `overrides` (nested as the file is) on top.

    Raises:
        ConfigError: the file cannot be read, a key is unknown or missing, a value has the wrong type or is refused.
    """
    given = {} if file is None else read(file, tomllib.loads, tomllib.TOMLDecodeError, "TOML")
    base = None if file is None else file.resolve().parent
    return load_values(cls, merged(given, overrides or {}), base=base, source="" if file is None else str(file))


def load_values(cls: type[T], values: Settings, *, base: Path | None = None, source: str = "") -> T:
    """The same from settings that were read already. Relative paths start from `base`, else the working directory;
    `source` is said in errors.

    Raises:
        ConfigError: a key is unknown or missing, a value has the wrong type or is refused.
    """
    try:
        return _dataclass(cls, values, _Place("", base or Path.cwd()))
    except ConfigError as error:
        raise ConfigError(error.key, error.problem, source) if source else error from None


def parse_overrides(items: Iterable[str]) -> dict[str, Any]:
    """`["vllm.dtype=bfloat16", …]` as nested settings. Raises ConfigError for an item that is no KEY=VALUE."""
    out: dict[str, Any] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not all(key.split(".")):
            raise ConfigError(item, "expected KEY=VALUE, such as vllm.dtype=bfloat16")
        *sections, name = key.split(".")
        out = merged(out, _nested(sections, {name: Text(value)}))
    return out


def _nested(sections: list[str], value: dict[str, Any]) -> dict[str, Any]:
    for section in reversed(sections):
        value = {section: value}
    return value


def read(file: Path, parse: Callable[[str], Any], broken: type[Exception], kind: str) -> Any:
    """What `parse` makes of a file's text; `broken` is what it raises of a text that is no `kind`.

    Raises:
        ConfigError: the file cannot be read, or is no `kind`.
    """
    try:
        return parse(file.read_text())
    except broken as error:
        raise ConfigError(str(file), f"is not valid {kind}: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(file), f"cannot be read: {getattr(error, 'strerror', None) or error}") from error


def merged(under: Settings, over: Settings) -> dict[str, Any]:
    """Nested settings with others on top."""
    out = dict(under)
    for key, value in over.items():
        old = out.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        out[key] = merged(old, value) if both and isinstance(old, Mapping) else value
    return out


# ---- values -------------------------------------------------------------------------------------


def _dataclass(cls: type[T], given: Settings, place: _Place) -> T:
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    for name in given:
        if name not in fields:
            raise ConfigError(place.inside(name).key, _unknown(name, fields))
    hints = typing.get_type_hints(cls)
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in given:
            raise ConfigError(place.inside(name).key, f"is required ({describe(hints[name])})")
    values = {name: _convert(hints[name], value, place.inside(name)) for name, value in given.items()}
    try:
        return cls(**values)
    except ConfigError:
        raise
    except (ValueError, WeightplaneError) as error:
        raise ConfigError(place.key, str(error)) from error


def _unknown(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"unknown key; did you mean {near[0]}?" if near else f"unknown key; known are {', '.join(names)}"


def _convert(hint: Any, value: Any, place: _Place) -> Any:
    if hint is Any:
        return _literal_text(value) if isinstance(value, Text) else value
    if isinstance(hint, NewType):
        return _convert(hint.__supertype__, value, place)
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _union(hint, value, place)
    if origin is Literal:
        return _one_of(hint, get_args(hint), value, place)
    if origin in _COLLECTIONS:
        return _COLLECTIONS[origin](hint, _parsed(hint, value, place), place)
    if isinstance(hint, type):
        return _plain(hint, value, place)
    raise TypeError(f"settings of type {hint} are not understood")


def _plain(hint: type, value: Any, place: _Place) -> Any:
    if dataclasses.is_dataclass(hint):
        table = _parsed(hint, value, place)
        if not isinstance(table, Mapping):
            raise _wrong(hint, value, place)
        return _dataclass(hint, table, place)
    if issubclass(hint, enum.Enum):
        return hint(_one_of(hint, [member.value for member in hint], value, place))
    if issubclass(hint, Path):
        if not isinstance(value, str):
            raise _wrong(hint, value, place)
        return Path(value).expanduser() if isinstance(value, Text) else place.base / Path(value).expanduser()
    if hint is str:
        return str(value) if isinstance(value, str) else _refuse(hint, value, place)
    return _number(hint, _parsed(hint, value, place), place)


def _number(hint: type, value: Any, place: _Place) -> Any:
    accepted = {bool: (bool,), int: (int,), float: (int, float)}.get(hint)
    if accepted is None:
        raise TypeError(f"settings of type {hint} are not understood")
    if not isinstance(value, accepted) or (hint is not bool and isinstance(value, bool)):
        raise _wrong(hint, value, place)
    return hint(value)


def _union(hint: Any, value: Any, place: _Place) -> Any:
    choices = [choice for choice in get_args(hint) if choice is not types.NoneType]
    problem: ConfigError | None = None
    for choice in choices:
        try:
            return _convert(choice, value, place)
        except ConfigError as error:
            problem = error
    if len(choices) == 1 and problem is not None:
        raise problem  # it names the fault, which may lie deeper
    raise _wrong(hint, value, place)


def _one_of(hint: Any, allowed: Iterable[Any], value: Any, place: _Place) -> Any:
    for choice in allowed:
        if value == choice or (isinstance(value, Text) and str(choice) == value):
            return choice
    return _refuse(hint, value, place)


def _tuple(hint: Any, value: Any, place: _Place) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise _wrong(hint, value, place)
    arguments = get_args(hint)
    if len(arguments) == 2 and arguments[1] is ...:
        arguments = (arguments[0],) * len(value)
    if len(arguments) != len(value):
        raise _wrong(hint, value, place)
    return tuple(_convert(h, v, place.inside(str(i))) for i, (h, v) in enumerate(zip(arguments, value, strict=True)))


def _list(hint: Any, value: Any, place: _Place) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise _wrong(hint, value, place)
    return [_convert(get_args(hint)[0], v, place.inside(str(i))) for i, v in enumerate(value)]


def _dict(hint: Any, value: Any, place: _Place) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _wrong(hint, value, place)
    return {str(k): _convert(get_args(hint)[1], v, place.inside(str(k))) for k, v in value.items()}


_COLLECTIONS: dict[Any, Callable[[Any, Any, _Place], Any]] = {
    tuple: _tuple,
    list: _list,
    dict: _dict,
    Mapping: _dict,
}


def _parsed(hint: Any, value: Any, place: _Place) -> Any:
    """Text of a command line as the TOML value that it spells."""
    if not isinstance(value, Text):
        return value
    parsed = _literal_text(value)
    if isinstance(parsed, str) and not value.startswith(('"', "'")):
        raise _wrong(hint, value, place)
    return parsed


def _literal_text(value: str) -> Any:
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return str(value)


# ---- words --------------------------------------------------------------------------------------


def describe(hint: Any) -> str:
    """The type as people say it."""
    if isinstance(hint, NewType):
        return describe(hint.__supertype__)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(a) for a in arguments if a is not types.NoneType)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, arguments))
    if origin in (tuple, list):
        variable = origin is list or (len(arguments) == 2 and arguments[1] is ...)
        return f"list of {describe(arguments[0])}" if variable else f"list of {len(arguments)} values"
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return "one of " + ", ".join(repr(member.value) for member in hint)
    if origin in (dict, Mapping) or dataclasses.is_dataclass(hint):
        return "table"
    return _NAMES.get(hint, str(hint))


_NAMES: dict[Any, str] = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    Path: "path",
    Any: "value",
}


def _wrong(hint: Any, value: Any, place: _Place) -> ConfigError:
    return ConfigError(place.key, f"expected {describe(hint)}, got {_shown(value)}")


def _refuse(hint: Any, value: Any, place: _Place) -> Any:
    raise _wrong(hint, value, place)


def _shown(value: Any) -> str:
    if isinstance(value, Text):
        return f"{str(value)!r}"
    kind = (_NAMES | {list: "list", dict: "table"}).get(type(value), "")
    return f"{value!r} ({kind})" if kind else repr(value)
