"""Between messages and the core's types. Protobuf objects end here; the core never sees one. No gRPC.

Every function expects a validated message (`controlplane.rpc.validation`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.struct_pb2 import Struct

from controlplane.core.errors import InvalidRequest
from controlplane.core.lag import FleetCommit
from controlplane.core.layout import MODEL_ONLY, DType, Layout, Target, TargetKind, TensorSpec, Tie
from controlplane.core.pauses import DEFAULT_WAIT_SECONDS, PauseMode, PausePolicy
from controlplane.core.pins import ANY, Pin
from controlplane.core.routed_experts import RoutedExperts
from controlplane.core.sampling import SamplingSettings
from controlplane.core.versions import EngineId, Incarnation, Term, WeightVersion
from controlplane.stacks import Stacks
from weightplane.v1 import fleet_pb2, layout_pb2, lifecycle_pb2, pause_pb2, rollout_pb2, version_pb2, weight_update_pb2

LAYOUT_PART_BYTES = 1_000_000
"""Largest layout part, estimated before encoding; well below the message limit."""
_TENSOR_OVERHEAD_BYTES = 64
_MAX_TENSORS_PER_PART = 16384

_DTYPES = {d: layout_pb2.Dtype.Value(f"DTYPE_{d.name}") for d in DType}
_DTYPES_BACK = {v: k for k, v in _DTYPES.items()}
_TARGETS = {t: layout_pb2.TargetKind.Value(f"TARGET_KIND_{t.name}") for t in TargetKind}
_TARGETS_BACK = {v: k for k, v in _TARGETS.items()}


def version_to_proto(version: WeightVersion) -> version_pb2.WeightVersion:
    return version_pb2.WeightVersion(term=version.term, number=version.number)


def version_from_proto(message: version_pb2.WeightVersion) -> WeightVersion:
    return WeightVersion(number=message.number, term=Term(message.term))


def commit_to_proto(commit: FleetCommit) -> fleet_pb2.FleetCommit:
    return fleet_pb2.FleetCommit(version=version_to_proto(commit.version), ordinal=commit.ordinal)


def commit_from_proto(message: fleet_pb2.FleetCommit) -> FleetCommit:
    return FleetCommit(version_from_proto(message.version), message.ordinal)


_PAUSES = {mode: pause_pb2.PauseMode.Value(f"PAUSE_MODE_{mode.name}") for mode in PauseMode}
_PAUSES_BACK = {v: k for k, v in _PAUSES.items()}


def pause_to_proto(policy: PausePolicy) -> pause_pb2.PausePolicy:
    return pause_pb2.PausePolicy(
        mode=_PAUSES[policy.mode],
        wait_limit=seconds_to_proto(policy.wait_seconds),
        fallback=_PAUSES[policy.fallback],
    )


def pause_from_proto(
    message: pause_pb2.PausePolicy | lifecycle_pb2.PauseGenerationRequest,
) -> PausePolicy:
    """Raises InvalidRequest: it cannot be meant."""
    limit = seconds_from_proto(message.wait_limit) if message.HasField("wait_limit") else DEFAULT_WAIT_SECONDS
    policy = PausePolicy(
        _PAUSES_BACK.get(message.mode, PauseMode.KEEP), limit, _PAUSES_BACK.get(message.fallback, PauseMode.KEEP)
    )
    if policy.problem:
        raise InvalidRequest("pause", policy.problem)
    return policy


def pin_to_proto(pin: Pin) -> rollout_pb2.Pin | None:
    """None for a pin that allows any version."""
    if pin == ANY:
        return None
    return rollout_pb2.Pin(
        min_version=None if pin.min_version is None else version_to_proto(pin.min_version),
        exact_version=None if pin.exact_version is None else version_to_proto(pin.exact_version),
        max_lag=pin.max_lag,
    )


def pin_from_proto(message: rollout_pb2.Pin) -> Pin:
    return Pin(
        min_version=version_from_proto(message.min_version) if message.HasField("min_version") else None,
        exact_version=version_from_proto(message.exact_version) if message.HasField("exact_version") else None,
        max_lag=message.max_lag if message.HasField("max_lag") else None,
    )


def engine_ref(engine_id: EngineId, incarnation: Incarnation) -> version_pb2.EngineRef:
    return version_pb2.EngineRef(engine_id=engine_id, incarnation=incarnation)


def seconds_to_proto(seconds: float) -> Duration:
    message = Duration()
    message.FromNanoseconds(round(seconds * 1e9))
    return message


def seconds_from_proto(message: Duration) -> float:
    return message.ToNanoseconds() / 1e9


def layout_to_parts(layout: Layout) -> Iterator[weight_update_pb2.LayoutPart]:
    """The layout in parts of at most LAYOUT_PART_BYTES, without a version: the sender sets that."""
    groups = list(_grouped(layout.tensors))
    for index, group in enumerate(groups):
        part = weight_update_pb2.LayoutPart(index=index, count=len(groups))
        part.tensors.extend(_tensor_to_proto(t) for t in group)
        if index == 0:
            part.format = layout.format
            part.ties.extend(layout_pb2.Tie(alias=t.alias, source=t.source) for t in layout.ties)
        yield part


def layout_from_parts(parts: Iterable[weight_update_pb2.LayoutPart]) -> Layout:
    """Raises LayoutInvalid as `Layout` does."""
    tensors: list[TensorSpec] = []
    ties: list[Tie] = []
    layout_format = "plain"
    for part in parts:
        tensors.extend(_tensor_from_proto(t) for t in part.tensors)
        ties.extend(Tie(alias=t.alias, source=t.source) for t in part.ties)
        layout_format = part.format or layout_format
    return Layout(tensors=tuple(tensors), ties=tuple(ties), format=layout_format)


def sampling_to_proto(settings: SamplingSettings) -> rollout_pb2.SamplingParams:
    return rollout_pb2.SamplingParams(
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        seed=settings.seed,
        stop_token_ids=settings.stop_token_ids,
        ignore_eos=settings.ignore_eos,
        min_tokens=settings.min_tokens,
        presence_penalty=settings.presence_penalty,
        frequency_penalty=settings.frequency_penalty,
        repetition_penalty=settings.repetition_penalty,
        omit_logprobs=settings.logprobs is None,
        n=settings.n if settings.n > 1 else 0,
        extra=_struct(settings.extra),
    )


def _struct(values: Mapping[str, Any]) -> Struct | None:
    return ParseDict(dict(values), Struct()) if values else None


def _plain(value: Any) -> Any:
    """JSON has one kind of number: whole ones become int again."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def sampling_from_proto(message: rollout_pb2.SamplingParams, priority: int = 0) -> SamplingSettings:
    given: dict[str, Any] = {f.name: value for f, value in message.ListFields() if f.name in _OPTIONAL_SAMPLING}
    return SamplingSettings(
        max_tokens=message.max_tokens,
        top_k=message.top_k,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        min_tokens=message.min_tokens,
        logprobs=None if message.omit_logprobs else 0,
        n=message.n or 1,
        extra={name: _plain(value) for name, value in MessageToDict(message.extra).items()},
        priority=priority,
        **given,
    )


_OPTIONAL_SAMPLING = (
    "temperature",
    "top_p",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


def routed_to_proto(routed: RoutedExperts) -> rollout_pb2.RoutedExperts:
    return rollout_pb2.RoutedExperts(
        first_token=routed.first_token, layers=routed.layers, top_k=routed.top_k, experts=routed.experts
    )


def routed_from_proto(message: rollout_pb2.RoutedExperts) -> RoutedExperts:
    return RoutedExperts(message.first_token, message.layers, message.top_k, message.experts)


def stacks_to_proto(processes: Iterable[Stacks]) -> lifecycle_pb2.DumpStacksResponse:
    response = lifecycle_pb2.DumpStacksResponse()
    for found in processes:
        response.processes.add(name=found.name, pid=found.pid, text=found.text, problem=found.problem)
    return response


def _grouped(tensors: tuple[TensorSpec, ...]) -> Iterator[list[TensorSpec]]:
    group: list[TensorSpec] = []
    size = 0
    for tensor in tensors:
        cost = len(tensor.name.encode()) + _TENSOR_OVERHEAD_BYTES
        if group and (size + cost > LAYOUT_PART_BYTES or len(group) == _MAX_TENSORS_PER_PART):
            yield group
            group, size = [], 0
        group.append(tensor)
        size += cost
    yield group


def _tensor_to_proto(tensor: TensorSpec) -> layout_pb2.TensorSpec:
    message = layout_pb2.TensorSpec(name=tensor.name, dtype=_DTYPES[tensor.dtype], shape=tensor.shape)
    if tensor.targets != MODEL_ONLY:
        message.targets.extend(layout_pb2.Target(kind=_TARGETS[t.kind], adapter=t.adapter) for t in tensor.targets)
    return message


def _tensor_from_proto(message: layout_pb2.TensorSpec) -> TensorSpec:
    targets = tuple(Target(kind=_TARGETS_BACK[t.kind], adapter=t.adapter) for t in message.targets)
    return TensorSpec(
        name=message.name,
        dtype=_DTYPES_BACK[message.dtype],
        shape=tuple(message.shape),
        targets=targets or MODEL_ONLY,
    )
