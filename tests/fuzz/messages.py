"""Bytes of requests, as Hypothesis draws them: well formed with odd values, cut, flipped, mistyped, too deep, junk.

Names are few: what a server remembers of a name must not be mistaken for memory that it loses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

MAX_DEPTH = 4
MAX_FRAMES = 5
"""Of one call."""
INTEGERS = (*(0, 1, 2, 3) * 4, 7, -1, 255, 4096, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63))
FLOATS = (0.0, 1.0, -1.0, 0.5, 1e308, float("inf"), float("nan"), 5e-324)
TEXTS = ("", "a", "policy", "e0", "e1", "../../etc/passwd", "x" * 300, "\x00", "ü", "CPU-0", "127.0.0.1:1", "::1")
OVERSIZED_BYTES = 5 << 20
UNKNOWN_FIELD = 4095


class Texts:
    """What is drawn for a text: mostly what the servers know under that field's name, so that calls get far."""

    def __init__(self, known: Mapping[str, str]) -> None:
        self._any = st.sampled_from([*known.values(), *TEXTS])
        self._of = {name: st.one_of(*[st.just(text)] * 4, self._any) for name, text in known.items()}

    def of(self, field: FieldDescriptor) -> st.SearchStrategy[str]:
        return self._of.get(field.name, self._any)


def calls(request: Descriptor, every: Sequence[Descriptor], texts: Texts, streams: bool) -> Any:
    """The frames of one call of an RPC whose requests are `request`s."""
    frame = st.one_of(
        *[_encoded(request, texts)] * 5,
        _encoded(request, texts).flatmap(_cut),
        _encoded(request, texts).flatmap(_flipped),
        st.sampled_from(every).flatmap(lambda other: _encoded(other, texts)),
        st.binary(max_size=64),
        st.sampled_from([20, 90, 200, 5000]).map(_deep),
    )
    return st.lists(frame, min_size=1, max_size=MAX_FRAMES if streams else 1)


def oversized() -> bytes:
    """One field that no message has, longer than a message may be."""
    return _field(UNKNOWN_FIELD, bytes(OVERSIZED_BYTES))


def _encoded(descriptor: Descriptor, texts: Texts) -> st.SearchStrategy[bytes]:
    return _message(descriptor, texts, MAX_DEPTH).map(lambda message: message.SerializeToString())


def _cut(data: bytes) -> st.SearchStrategy[bytes]:
    return st.integers(0, len(data)).map(lambda end: data[:end])


def _flipped(data: bytes) -> st.SearchStrategy[bytes]:
    places = st.lists(st.tuples(st.integers(0, max(len(data) - 1, 0)), st.integers(0, 255)), min_size=1, max_size=4)
    return places.map(lambda changes: _with(data, changes))


def _with(data: bytes, changes: Sequence[tuple[int, int]]) -> bytes:
    changed = bytearray(data or b"\x00")
    for place, value in changes:
        changed[place] = value
    return bytes(changed)


def _deep(levels: int) -> bytes:
    """Messages in one another, in the fields where the contract has messages."""
    data = b""
    for level in range(levels):
        data = _field((1, 5, 15)[level % 3], data)
    return data


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


# ---- messages ----


def _message(descriptor: Descriptor, texts: Texts, depth: int) -> st.SearchStrategy[Message]:
    made = GetMessageClass(descriptor)
    fields = [f for f in descriptor.fields if depth or f.message_type is None]

    def build(values: dict[str, Any]) -> Message:
        message = made()
        for name, value in values.items():
            _put(message, name, value)
        return message

    chosen = st.lists(st.sampled_from(fields), unique_by=lambda f: f.name) if fields else st.just([])
    return chosen.flatmap(lambda some: st.fixed_dictionaries({f.name: _values(f, texts, depth - 1) for f in some})).map(
        build
    )


def _put(message: Message, name: str, value: Any) -> None:
    field = message.DESCRIPTOR.fields_by_name[name]
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return
    if field.is_repeated:
        getattr(message, name).extend(value)
    elif field.message_type is not None:
        getattr(message, name).CopyFrom(value)
    else:
        setattr(message, name, value)


def _values(field: FieldDescriptor, texts: Texts, depth: int) -> st.SearchStrategy[Any]:
    one = _one(field, texts, depth)
    return st.lists(one, max_size=3) if field.is_repeated else one


def _one(field: FieldDescriptor, texts: Texts, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return _message(field.message_type, texts, depth)
    if field.enum_type is not None:
        known = [v.number for v in field.enum_type.values]
        return st.sampled_from([*known, *known, *known, 99])
    if field.type == field.TYPE_BYTES:
        return st.sampled_from([b"", bytes(8), bytes(32), bytes(40)])
    return texts.of(field) if field.cpp_type == FieldDescriptor.CPPTYPE_STRING else _numbers(field.cpp_type)


@cache
def _numbers(kind: int) -> st.SearchStrategy[Any]:
    bits = {FieldDescriptor.CPPTYPE_INT32: 31, FieldDescriptor.CPPTYPE_INT64: 63}
    if kind in bits:
        return st.sampled_from([n for n in INTEGERS if -(2 ** bits[kind]) <= n < 2 ** bits[kind]])
    if kind in (FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64):
        return st.sampled_from([n for n in INTEGERS if 0 <= n < 2**31])
    return st.booleans() if kind == FieldDescriptor.CPPTYPE_BOOL else st.sampled_from(FLOATS)
