"""The way into an engine: what is asked is checked, and waits outside the gate until it may begin.

Promises that nothing enters a shut gate, and that a pin is compared with what the engine holds and with nothing else
(INV-2). Refuses what the engine would die of, or would change in silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from google.protobuf.duration_pb2 import Duration

from controlplane.core import errors as e
from controlplane.core.engine_state import EngineState, HoldKind, Life, Poisoned
from controlplane.core.pins import Pin
from controlplane.core.sampling import SamplingSettings
from controlplane.core.versions import WeightVersion
from controlplane.rpc.codec import seconds_from_proto
from engine_agent.engine import EngineFacts
from engine_agent.life.engine_life import EngineLife

DEFAULT_WAIT_SECONDS = 30.0
MAX_WAITING = 1024
"""Requests that wait outside the gate; one more is refused at once."""
OWN_FIELDS = frozenset(SamplingSettings.__dataclass_fields__) | {
    "detokenize",
    "output_kind",
    "skip_clone",
    "stream_interval",  # keeps tokens back, so that no border could be drawn (INV-11)
}
"""Not to be given once more by name, or the agent's own to set."""
MULTIMODAL = frozenset({"multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs"})


class Addressed(Protocol):
    """A request that names its run and model."""

    @property
    def run_id(self) -> str: ...
    @property
    def model(self) -> str: ...


def check_identity(life: EngineLife, request: Addressed) -> None:
    """Raises WrongRun, WrongModel."""
    state = life.core.state
    if request.run_id != state.run_id:
        raise e.WrongRun(expected=state.run_id, got=request.run_id)
    if request.model != state.model:
        raise e.WrongModel(expected=state.model, got=request.model)


def check_request(facts: EngineFacts, prompt: Sequence[int], sampling: SamplingSettings) -> None:
    """Raises InvalidRequest."""
    check_ids("prompt_token_ids", prompt, facts.vocab_size)
    check_ids("sampling.stop_token_ids", sampling.stop_token_ids, facts.vocab_size)
    room = facts.max_model_len - len(prompt)
    if sampling.max_tokens > room:
        raise e.InvalidRequest(
            "sampling.max_tokens",
            f"{len(prompt)} prompt tokens and {sampling.max_tokens} more pass the engine's {facts.max_model_len}",
        )
    checks = [
        ("temperature", 0.0 <= sampling.temperature <= 100.0, "must be between 0 and 100"),
        ("top_p", 0.0 < sampling.top_p <= 1.0, "must be above 0 and at most 1"),
        ("min_p", 0.0 <= sampling.min_p <= 1.0, "must be between 0 and 1"),
        ("min_tokens", sampling.min_tokens <= sampling.max_tokens, "must be at most max_tokens"),
        ("presence_penalty", -2.0 <= sampling.presence_penalty <= 2.0, "must be between -2 and 2"),
        ("frequency_penalty", -2.0 <= sampling.frequency_penalty <= 2.0, "must be between -2 and 2"),
        ("repetition_penalty", 0.0 < sampling.repetition_penalty <= 100.0, "must be above 0 and at most 100"),
    ]
    for name, good, problem in checks:
        if not good:
            raise e.InvalidRequest(f"sampling.{name}", problem)
    for name in sampling.extra:
        if name in MULTIMODAL:
            raise e.InvalidRequest(f"sampling.extra.{name}", "prompts are token ids: no images, sound or video")
        if name in OWN_FIELDS:
            raise e.InvalidRequest(f"sampling.extra.{name}", "has a field of its own, or is the agent's to set")


def check_scored(facts: EngineFacts, tokens: Sequence[int]) -> None:
    """Raises InvalidRequest."""
    check_ids("token_ids", tokens, facts.vocab_size)
    if not 2 <= len(tokens) < facts.max_model_len:
        raise e.InvalidRequest("token_ids", f"2 to {facts.max_model_len - 1} can be scored, not {len(tokens)}")


def check_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidRequest."""
    if len(ids) and max(ids) >= vocab_size:
        raise e.InvalidRequest(field, f"{max(ids)} is outside of the vocabulary of {vocab_size}")


def wait_of(message: Duration | None) -> float:
    """Seconds that a request waits outside the gate."""
    return DEFAULT_WAIT_SECONDS if message is None else seconds_from_proto(message)


async def enter(life: EngineLife, pin: Pin, limit: float) -> WeightVersion:
    """Wait outside the gate until it is open and the pin is met, at most `limit` seconds; the version to begin with.

    Raises VersionUnavailable, EngineNotReady, EnginePoisoned, EngineDraining, LimitExceeded.
    """
    if life.counts.waiting >= MAX_WAITING:
        raise e.LimitExceeded(what="requests waiting outside the gate", limit=MAX_WAITING, got=life.counts.waiting + 1)

    def may_enter(state: EngineState) -> bool:
        if state.life in (Life.STOPPING, Life.DEAD):
            raise e.EngineNotReady(engine_id=state.engine_id, holds=state.life.value)
        if isinstance(state.weights, Poisoned) and not state.installing:
            raise e.EnginePoisoned(engine_id=state.engine_id, cause=state.weights.cause)
        draining = state.held_by(HoldKind.DRAINING)
        if draining is not None:
            raise e.EngineDraining(engine_id=state.engine_id, owner=draining)
        applied = state.applied
        return life.open and applied is not None and pin.allows(applied, life.core.commits)

    try:
        with life.counts.waiting_outside():
            state = await life.state.wait_for(may_enter, limit)
    except TimeoutError:
        raise _not_entered(life, pin) from None
    applied = state.applied
    assert applied is not None  # may_enter saw it, and nothing ran since
    return applied


def _not_entered(life: EngineLife, pin: Pin) -> e.WeightplaneError:
    state = life.core.state
    if pin.wants and (state.applied is None or not pin.allows(state.applied, life.core.commits)):
        applied = "unset" if state.applied is None else str(state.applied)
        return e.VersionUnavailable(wanted=str(pin), applied=applied)
    holds = ", ".join(sorted(map(str, state.holds))) or state.word(life.core.served)
    return e.EngineNotReady(engine_id=state.engine_id, holds=holds)
