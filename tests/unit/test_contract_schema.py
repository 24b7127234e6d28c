"""INV-2 and the rules, read off the descriptors: whoever adds a message meets these."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from controlplane.core.errors import FrameInvalid, WeightplaneError, error_classes, rebuild
from controlplane.rpc.errors import STATUS
from controlplane.rpc.validation import validate
from weightplane.v1 import (
    engine_pb2,
    fleet_pb2,
    layout_pb2,
    lifecycle_pb2,
    operator_pb2,
    pause_pb2,
    rollout_pb2,
    rules_pb2,
    version_pb2,
    weight_update_pb2,
)

FILES = (
    engine_pb2,
    fleet_pb2,
    layout_pb2,
    lifecycle_pb2,
    operator_pb2,
    pause_pb2,
    rollout_pb2,
    version_pb2,
    weight_update_pb2,
)
VERSION = version_pb2.WeightVersion.DESCRIPTOR


def reachable(descriptor: Descriptor, seen: set[str] | None = None) -> Iterator[Descriptor]:
    """The message and every message inside it."""
    seen = set() if seen is None else seen
    if descriptor.full_name in seen:
        return
    seen.add(descriptor.full_name)
    yield descriptor
    for field in descriptor.fields:
        if field.message_type is not None:
            yield from reachable(field.message_type, seen)


def _reason(cls: type[WeightplaneError]) -> str:
    return cls.reason


CLASSES: list[type[WeightplaneError]] = sorted(STATUS, key=_reason)


def frames(message: Descriptor) -> list[Descriptor]:
    return [f.message_type for f in message.oneofs_by_name["frame"].fields if f.message_type is not None]


@pytest.mark.parametrize("frame", frames(weight_update_pb2.UpdateWeightsRequest.DESCRIPTOR), ids=lambda d: d.name)
def test_inv2_each_payload_frame_carries_its_version(frame: Descriptor) -> None:
    field = frame.fields_by_name.get("version")
    assert field is not None
    assert field.message_type == VERSION
    assert field.GetOptions().Extensions[rules_pb2.rules].required


def test_inv2_no_lifecycle_request_can_carry_a_version() -> None:
    service = lifecycle_pb2.DESCRIPTOR.services_by_name["Lifecycle"]
    carriers = [m.name for m in service.methods if VERSION in list(reachable(m.input_type))]
    assert carriers == []


def test_inv2_the_check_would_see_a_version_in_a_lifecycle_request() -> None:
    assert VERSION in list(reachable(rollout_pb2.GenerateRequest.DESCRIPTOR))


def test_s1_no_message_of_the_contract_has_room_for_a_pickle() -> None:
    """Bytes are digests, checksums, raw tensor bytes, experts' numbers and CUDA's handles; a new one must be added here
    on purpose."""
    known = {
        "BufferHandle.inline",
        "CudaIpcRange.memory_handle",
        "CudaIpcRange.ref_counter_handle",
        "CudaIpcRange.event_handle",
        "TensorRecord.checksum",
        "Manifest.layout_digest",
        "Commit.content_digest",
        "UpdateApplied.content_digest",
        "EngineStatus.content_digest",
        "BeginUpdateRequest.layout_digest",
        "Plan.digest",
        "Base.content_digest",
        "Checkpoint.content_digest",
        "Checkpoint.layout_digest",
        "UpdateState.content_digest",
        "RoutedExperts.experts",
        "DeviceExport.probe_checksum",
    }
    found = {
        f"{message.name}.{field.name}"
        for file in FILES
        for message in file.DESCRIPTOR.message_types_by_name.values()
        for field in message.fields
        if field.type == field.TYPE_BYTES
    }
    assert found == known


def test_an_open_frame_is_below_16_kib() -> None:
    ref = version_pb2.EngineRef(engine_id="e" * 128, incarnation="i" * 64)
    opened = weight_update_pb2.UpdateOpen(
        run_id="r" * 128,
        model="m" * 128,
        engine=ref,
        update_id="u" * 64,
        writer_term=2**62,
        version=version_pb2.WeightVersion(term=2**62, number=2**62),
        manifest=weight_update_pb2.Manifest(layout_digest=b"d" * 32, tensor_count=10**6, byte_count=2**62),
        transport=weight_update_pb2.TRANSPORT_INLINE,
    )
    validate(opened)
    assert opened.ByteSize() < 16 * 1024


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (weight_update_pb2.UpdateWeightsRequest(), "frame"),
        (version_pb2.WeightVersion(term=1), "number"),
        (version_pb2.WeightVersion(term=-1, number=0), "term"),
        (version_pb2.EngineRef(engine_id="../x", incarnation="i"), "engine_id"),
        (layout_pb2.TensorSpec(name="n"), "dtype"),
        (layout_pb2.TensorSpec(name="n", dtype=layout_pb2.DTYPE_F32, shape=[4, -1]), "shape[1]"),
        (layout_pb2.SharedMemoryRange(segment="weightplane-/etc", host_id="h", offset=0, byte_count=0), "segment"),
        (
            weight_update_pb2.TensorRecord(tensor=0, tensor_offset=0, buffer_offset=0, byte_count=1, checksum=b"1"),
            "checksum",
        ),
        (
            weight_update_pb2.Chunk(
                version=version_pb2.WeightVersion(term=1, number=1),
                index=0,
                records=[weight_update_pb2.TensorRecord(tensor=0)],
                buffers=[layout_pb2.BufferHandle(inline=b"")],
            ),
            "records[0].tensor_offset",
        ),
        (rollout_pb2.SamplingParams(), "max_tokens"),
        (engine_pb2.Hold(kind=77), "kind"),  # type: ignore[arg-type]
    ],
)
def test_a_broken_rule_is_named_by_its_field(message: Message, field: str) -> None:
    with pytest.raises(FrameInvalid) as refusal:
        validate(message)
    assert refusal.value.field == field


def test_zero_is_a_value_where_the_schema_says_so() -> None:
    validate(version_pb2.WeightVersion(term=0, number=0))


def test_each_error_has_exactly_one_status_and_one_reason_of_its_own() -> None:
    classes = list(error_classes())
    mapped = [c for c in classes if c.__module__ == "controlplane.core.errors"]
    assert set(mapped) == set(STATUS)
    assert len({c.reason for c in mapped}) == len(mapped)


@pytest.mark.parametrize("cls", CLASSES, ids=_reason)
def test_an_error_survives_the_wire(cls: type[WeightplaneError]) -> None:
    samples = {"int": 3, "float": 2.5, "bool": True, "str": "x", "list[str]": ["p", "q"], "tuple[int, ...]": (2, 3)}
    error = cls(**{f.name: samples[str(f.type)] for f in dataclasses.fields(cls)})
    again = rebuild(error.reason, error.metadata())
    assert type(again) is cls
    assert vars(again) == vars(error)


def test_reasons_named_in_the_protos_exist() -> None:
    known = {c.reason for c in error_classes()}
    enums = {
        value.name for file in FILES for enum in file.DESCRIPTOR.enum_types_by_name.values() for value in enum.values
    }
    statuses = {s.name for s in STATUS.values()} | {"UNAVAILABLE", "CANCELLED"}
    words = {"GO", "UNKNOWN", "HELD", "FAILED", "OPERATOR", "POISONED", "READY", "MODEL", "INV", "COMMITTED", "MUST"}
    for file in FILES:
        path = Path("protos") / file.DESCRIPTOR.name
        text = (Path(__file__).parents[2] / path).read_text()
        comments = " ".join(line for line in text.splitlines() if line.strip().startswith("//"))
        for word in set(re.findall(r"\b[A-Z][A-Z]+(?:_[A-Z]+)+\b", comments)):
            assert word in known | statuses | enums | words, f"{path}: {word} is no reason of ours"
