"""Streams that an engine agent must refuse: an honest open frame with something changed, and what follows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from controlplane.core import engine_events as ee
from controlplane.core.assembly import Record
from controlplane.core.engine_state import Held, Poisoned
from controlplane.core.layout import DRAFT_ONLY, MODEL_ONLY, DType, Layout, TensorSpec
from controlplane.core.versions import EngineId, Incarnation, ModelName, RunId, Term, UpdateId, WeightVersion
from controlplane.sim.frames import ChunkFrame
from controlplane.sim.life import Life
from controlplane.sim.settings import MODELS, ModelSpec, checksum, digest_of
from controlplane.sim.update_stream import UpdateStream

CONTENT = 999
"""Weights that are no version's."""
Frame = Callable[[UpdateStream], None]


@dataclass(frozen=True, slots=True)
class Lie:
    """Changes to an honest open frame, and what follows it."""

    changes: dict[str, object]
    frames: Sequence[Frame] = ()


def opened(life: Life, update_id: UpdateId, version: WeightVersion) -> ee.Opened:
    """What an honest trainer would send."""
    state, layout = life.core.state, life.agent.spec.layout
    return ee.Opened(
        0,
        state.run_id,
        state.model,
        state.incarnation,
        update_id,
        life.core.term,
        version,
        layout.digest,
        len(layout.tensors),
        layout.byte_count,
        engine_id=state.engine_id,
    )


def lies(life: Life, version: WeightVersion) -> dict[str, Lie]:
    """By the reason that each should meet, of an engine that is awake and trained; or by what it tries."""
    return {
        **_strangers(life, version),
        **_coordinators(life, version),
        **_deltas(life),
        **_streaming(life, version),
        **_streams(life, version),
        **_layouts(life),
    }


def _strangers(life: Life, version: WeightVersion) -> dict[str, Lie]:
    other = next(m for m in MODELS if m != life.agent.spec.name)
    return {
        "WRONG_RUN": Lie({"run_id": RunId("other")}),
        "WRONG_MODEL": Lie({"model": other}),
        "a model that nobody has": Lie({"model": ModelName("teacher")}),
        "UNKNOWN_ENGINE": Lie({"engine_id": EngineId("another")}),
        "WRONG_INCARNATION": Lie({"incarnation": Incarnation("old")}),
        "STALE_TERM": Lie({"writer_term": Term(max(life.core.term - 1, 0))}),
        "STALE_VERSION": Lie({"version": WeightVersion(max(life.notes.highest - 1, 0), version.term)}),
    }


def _coordinators(life: Life, version: WeightVersion) -> dict[str, Lie]:
    """Who says that it is one."""
    own = life.core.coordinator_term
    lower = WeightVersion(max(life.notes.highest - 1, 0), Term(0))
    return {
        "an older coordinator": Lie({"by_coordinator": True, "writer_term": Term(max(own - 1, 0))}),
        "a coordinator brings what is not served": Lie({"by_coordinator": True, "writer_term": own, "version": lower}),
        "a coordinator goes away": Lie({"by_coordinator": True, "writer_term": own}, (_layout_if_needed(life),)),
    }


def _deltas(life: Life) -> dict[str, Lie]:
    """This engine takes none, whatever their base."""
    weights, other = life.core.state.weights, Lie({"base": Held(WeightVersion(7, Term(1)), b"of other weights")})
    if isinstance(weights, Poisoned):
        return {"ENGINE_POISONED": other}
    lies = {"BASE_MISMATCH": other}
    if isinstance(weights, Held):
        lies["UNSUPPORTED_BY_ENGINE"] = Lie({"base": weights})
    return lies


def _streaming(life: Life, version: WeightVersion) -> dict[str, Lie]:
    """None of it comes to a chunk that the engine would install."""
    if not life.agent.seat.streaming:
        return {"to be streamed": Lie({"streaming": True})}
    layout, weights = _layout_if_needed(life), life.core.state.weights
    lies = {
        "a stream of another layout": Lie({"streaming": True, "layout_digest": b"x" * 32}, (layout,)),
        "a chunk before the layout": Lie({"streaming": True, "layout_digest": b"x" * 32}, (_chunk(life, version, 0),)),
        "a chunk of another version": Lie({"streaming": True}, (layout, _chunk(life, WeightVersion(3, Term(0)), 0))),
        "a commit without a chunk": Lie({"streaming": True}, (layout, lambda s: s.commit(version, 0, 0, b"y" * 32))),
        "a stream that is given up": Lie({"streaming": True}, (layout, lambda s: s.abort("no reason"))),
        "a stream that is silent": Lie({"streaming": True}, (layout,)),
    }
    if isinstance(weights, Held):
        lies["a delta to be streamed"] = Lie({"streaming": True, "base": weights})
    return lies


def _streams(life: Life, version: WeightVersion) -> dict[str, Lie]:
    spec, digest = life.agent.spec, digest_of(CONTENT)
    size, layout = spec.layout.byte_count, _layout_if_needed(life)
    whole = (layout, _chunk(life, version, 0), _chunk(life, version, 1))
    lies = {
        "LAYOUT_UNKNOWN": Lie({"layout_digest": b"x" * 32}, (layout,)),
        "BYTE_COUNT_MISMATCH": Lie({}, (*whole, lambda s: s.commit(version, 2, 1, digest))),
        "chunks": Lie({}, (*whole, lambda s: s.commit(version, 3, size, digest))),
        "manifest": Lie({"byte_count": 1}, (layout,)),
        "content": Lie({}, (*whole, lambda s: s.commit(version, 2, size, b"y" * 32))),
        "FRAME_OUT_OF_ORDER": Lie({}, (layout, lambda s: s.commit(version, 0, 0, digest))),
        "UPDATE_ABORTED": Lie({}, (layout, lambda s: s.abort("no reason"))),
        "silence": Lie({}, (layout,)),
        "CHECKSUM_MISMATCH": Lie({}, (layout, _chunk(life, version, 0, really=7))),
        "INVALID_MESSAGE": Lie({}, (layout, _frame(version, 0, Record(99, 0, 0, 1, None), CONTENT))),
        "another version": Lie({}, (layout, _chunk(life, WeightVersion(3, Term(0)), 0))),
    }
    if life.notes.highest > 0:
        same = WeightVersion(life.notes.highest, version.term)
        frames = (layout, _chunk(life, same, 0), _chunk(life, same, 1))
        name = "what is held again" if life.core.state.applied == same else "VERSION_CONFLICT"
        lies[name] = Lie({"version": same}, (*frames, lambda s: s.commit(same, 2, size, digest)))
    return lies


def _layouts(life: Life) -> dict[str, Lie]:
    a, b = life.agent.spec.layout.tensors
    changed = {
        "MANIFEST_INCOMPLETE": Layout((a,)),
        "UNKNOWN_TENSOR": Layout((a, b, TensorSpec("c", DType.BF16, (1,)))),
        "SHAPE_MISMATCH": Layout((a, replace(b, shape=(4,)))),
        "DTYPE_MISMATCH": Layout((a, replace(b, dtype=DType.F32))),
        "FORMAT_MISMATCH": Layout((a, b), format="other"),
        **_drafts(life.agent.spec, a, b),
        "another model's layout": next(s.layout for s in MODELS.values() if s is not life.agent.spec),
    }
    lies = {"LAYOUT_INVALID": Lie({"layout_digest": b"z" * 32}, (lambda s: s.layout(lambda: Layout((a, a))),))}
    for reason, layout in changed.items():
        changes: dict[str, object] = {"layout_digest": layout.digest, "byte_count": layout.byte_count}
        lies[reason] = Lie(changes, (lambda s, layout=layout: s.layout(lambda: layout),))  # type: ignore[misc]
    return lies


def _drafts(spec: ModelSpec, a: TensorSpec, b: TensorSpec) -> dict[str, Layout]:
    """A draft that the engine has not, or has otherwise: it is covered whole, or not mentioned."""
    own = TensorSpec("draft:d", DType.BF16, (2,), DRAFT_ONLY)
    if spec.layout.draft is None:
        return {"a draft of one that has none": Layout((a, b, own))}
    alone = replace(b, targets=MODEL_ONLY)
    return {
        "a tensor that its draft does not have": Layout((a, b, own)),
        "a part of its draft": Layout((replace(a, targets=b.targets), alone)),
    }


def _layout_if_needed(life: Life) -> Frame:
    layout = life.agent.spec.layout
    return lambda s: s.layout(lambda: layout) if s.layout_needed else None


def _chunk(life: Life, version: WeightVersion, index: int, really: int = CONTENT) -> Frame:
    """A whole tensor; `really` are the bytes that come, whatever its checksum says."""
    size = life.agent.spec.layout.tensors[index].byte_count
    return _frame(version, index, Record(index, 0, 0, size, checksum(CONTENT, index)), really)


def _frame(version: WeightVersion, index: int, record: Record, content: int) -> Frame:
    def event(stream: int) -> ee.ChunkArrived:
        return ee.ChunkArrived(stream, version, index, (record,), record.byte_count)

    return lambda s: s.chunk(ChunkFrame(event, {record.tensor: content}))
