"""Deltas at an engine's core: only to just what is held and kept (INV-5), and what results is a whole version."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controlplane.core import engine_core as core
from controlplane.core import engine_effects as fx
from controlplane.core import engine_events as events
from controlplane.core import errors as e
from controlplane.core.assembly import Record
from controlplane.core.engine_state import Held, KeptBase, Stage, Timings
from controlplane.core.layout import content_digest
from tests.support.engine_core import LAYOUT, Agent, checksums, version

DIGEST = content_digest(checksums(1))
KEPT = KeptBase(Held(version(1), DIGEST), LAYOUT.digest, tuple(checksums(1)))


def patched() -> Agent:
    """It applied 1, keeps its bytes, and takes deltas."""
    agent = Agent()
    agent.core.capabilities |= {core.DELTA}
    agent.apply(1)
    return agent


def test_a_delta_to_what_is_held_and_kept_results_in_a_whole_version() -> None:
    agent = patched()
    agent.open(2, base=KEPT.weights, kept=KEPT)
    fresh, old = checksums(2)[0], checksums(1)[1]
    effects = agent.handle(events.ChunkArrived(1, version(2), 0, [Record(0, 4, 0, 16, fresh, 2)], 16))
    assert effects == [fx.Verify(1, (0,), False)]
    with pytest.raises(e.FrameOutOfOrder):
        agent.handle(events.BytesVerified(1))
    effects = agent.handle(events.ChunkArrived(1, version(2), 1, [], 0, last=True))
    assert effects == [fx.Verify(1, (1,), True)]
    agent.handle(events.BytesVerified(1))
    digest = content_digest([fresh, old])
    agent.handle(events.CommitArrived(1, version(2), 2, 16, digest))
    agent.handle(events.Quiesced())
    agent.handle(events.CanaryPassed(Timings()))
    assert agent.core.state.weights == Held(version(2), digest)


@pytest.mark.parametrize(
    "kept",
    [
        None,
        replace(KEPT, weights=Held(version(1), b"o" * 32)),
        replace(KEPT, weights=Held(version(9), DIGEST)),
        replace(KEPT, layout_digest=b"l" * 32),
    ],
    ids=["no bytes", "other bytes", "another version's", "another layout"],
)
def test_inv5_a_delta_to_what_is_held_but_not_kept_is_refused_before_anything_is_touched(
    kept: KeptBase | None,
) -> None:
    agent = patched()
    with pytest.raises(e.BaseMismatch, match="has no bytes of it"):
        agent.open(2, base=KEPT.weights, kept=kept)
    assert agent.applied == version(1)
    assert agent.stage is Stage.APPLIED


def test_a_delta_that_ends_before_its_last_chunk_is_never_ready() -> None:
    agent = patched()
    agent.open(2, base=KEPT.weights, kept=KEPT)
    agent.handle(events.ChunkArrived(1, version(2), 0, [Record(0, 0, 0, 8, None, 1)], 8))
    with pytest.raises(e.ManifestIncomplete):
        agent.handle(events.ChunkArrived(1, version(2), 1, [], 0, last=True))
    agent.handle(events.StreamEnded(1, "it broke"))
    assert agent.applied == version(1)
    assert agent.core.state.weights == KEPT.weights
