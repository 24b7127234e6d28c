"""The agent's half of an install: vLLM's own start, update and finish, driven to one of three ends.

- installed: every worker checked, loaded and let go, every cache was cleared, and only then did the engine take
  the version's label (INV-1);
- refused: a worker found the staged bytes wanting before any worker touched its weights; the old label stands;
- failed with weights touched: the engine's label becomes MIXTURE, so that no token can carry a true one.

A failure of one worker is a failure of the engine: the answers are counted, and one worker that installed while
another refused makes a mixture.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, TypeVar

from controlplane.core.errors import InstallFailed, Refused
from controlplane.core.layout import Expected, Layout, TargetKind, own_name
from engine_agent.engine import (
    DRAFT_IS_A_MIXTURE,
    DeviceChunk,
    InstallReport,
    Placement,
    SegmentSpan,
    StagedPart,
    StagedWeights,
)
from engine_agent.vllm.calls import Calls

T = TypeVar("T")

MIXTURE = "mixture"
"""The label of an engine whose weights are no version."""


class Installer:
    """Installs into one engine. Knows which layout its workers were told."""

    def __init__(
        self, core: Calls, device_uuids: tuple[str, ...], expected: Expected, call_limit_seconds: float
    ) -> None:
        self._core = core
        self.expected = expected
        """What an update must cover."""
        self._device_uuids = device_uuids
        self._limit = call_limit_seconds
        self._layout_digest = b""
        self._touching = False
        self._draft_suspect = False
        """An install that touched the draft model failed."""
        self._streaming: StagedWeights | None = None
        """Layout and label of a streaming install under way; its bytes come in parts."""
        self.kv_suspect = False
        """The KV cache may hold a NaN, which later requests would meet; it is zeroed when caches are cleared next."""
        self.kv_resident = True
        """False: the KV cache sleeps, and nobody may touch its memory."""

    async def install(self, staged: StagedWeights) -> InstallReport:
        """Raises InstallFailed, EngineDied, DeadlineExceeded (which is an unknown outcome)."""
        self._touching = False
        try:
            return await self._install(staged)
        except Exception as e:
            if not self._core.answered(e):
                raise
            raise await self._failed(staged, str(e), touched=self._touching) from e

    async def _install(self, staged: StagedWeights) -> InstallReport:
        llm, install_id = self._core.llm, uuid.uuid4().hex
        started = time.perf_counter()
        if not await self._ask(llm.is_paused(), "is_paused"):
            raise InstallFailed(self._core.engine_id, staged.label, False, "the engine is not quiesced")
        self._check_layout(staged)
        await self._tell_layout(staged)
        if staged.layout.draft is None:
            await self._ask(llm.start_weight_update(), "start_weight_update")
        else:
            await self._ask(llm.start_draft_weight_update(), "start_draft_weight_update")
        await self._told(staged, told_at_check(staged) | {"install_id": install_id})
        self._touching = True
        loaded = await self._told(staged, {"step": "install", "install_id": install_id})
        loaded_at = time.perf_counter()
        await self._seal(staged)
        self._draft_suspect = False
        ended = time.perf_counter()
        return InstallReport(loaded, loaded_at - started, ended - loaded_at)

    def _check_layout(self, staged: StagedWeights) -> None:
        """Once more, at the last moment: vLLM takes a layout with a missing tensor, and cuts one that is too large."""
        if self._draft_suspect and staged.layout.draft is None:
            raise InstallFailed(self._core.engine_id, staged.label, False, DRAFT_IS_A_MIXTURE)
        try:
            self.expected.check(staged.layout)
        except Refused as e:
            raise InstallFailed(self._core.engine_id, staged.label, False, str(e)) from e

    async def _tell_layout(self, staged: StagedWeights) -> None:
        if self._layout_digest == staged.layout.digest:
            return
        request = self._core.init_request(told_at_init(staged, self._device_uuids))
        await self._ask(self._core.llm.init_weight_transfer_engine(request), "init_weight_transfer_engine")
        self._layout_digest = staged.layout.digest

    async def _require_all_well(self, staged: StagedWeights) -> int:
        """Every worker's last step must have gone well; returns the number of tensors that each loaded."""
        answers = await self._core.collect("weightplane_result", self._limit)
        failed = [a for a in answers if not a["ok"]]
        if not failed:
            return min(int(a["loaded"]) for a in answers)
        cause = "; ".join(f"worker {a['rank']}: {a['cause']}" for a in failed)
        touched = self._touching and any(a["ok"] or a["touched"] for a in answers)
        raise await self._failed(staged, cause, touched=touched)

    async def _failed(self, staged: StagedWeights, cause: str, *, touched: bool) -> InstallFailed:
        """End vLLM's session without the version's label, and return the error to raise."""
        if touched:
            self._draft_suspect |= staged.layout.draft is not None
            await self._ask(self._core.llm.update_weight_version(MIXTURE), "update_weight_version")
        await self.close_session()
        return InstallFailed(self._core.engine_id, staged.label, touched, cause)

    async def close_session(self) -> None:
        """End vLLM's session if one is open, without a label; that none is, is no error."""
        try:
            await self._ask(self._core.llm.finish_weight_update(), "finish_weight_update")
        except Exception as e:
            if not self._core.answered(e):
                raise

    # ---- streaming ----

    async def begin_streaming(self, layout: Layout, label: str) -> None:
        """Raises InstallFailed, EngineDied, DeadlineExceeded, as `install` does."""
        self._touching = False
        whole = StagedWeights(layout, label, {}, ())
        await self._step(whole, self._open_streaming(whole))
        self._streaming = whole

    async def _open_streaming(self, whole: StagedWeights) -> None:
        llm = self._core.llm
        if not await self._ask(llm.is_paused(), "is_paused"):
            raise InstallFailed(self._core.engine_id, whole.label, False, "the engine is not quiesced")
        self._check_layout(whole)
        await self._tell_layout(whole)
        await self._ask(llm.start_weight_update(), "start_weight_update")
        self._touching = True
        await self._told(whole, {"step": "begin", "layout_digest": whole.layout.digest.hex()})

    @property
    def streaming(self) -> bool:
        """A streaming install is under way."""
        return self._streaming is not None

    async def install_part(self, part: StagedPart) -> None:
        whole = self._under_way()
        places = {"tensors": list(part.tensors), **_places(part.chunks, part.placements)}
        if part.device is not None:
            places |= _told_at_device_part(part.device)
        await self._step(whole, self._told(whole, {"step": "part", **places}))

    async def finish_streaming(self) -> InstallReport:
        whole = self._under_way()
        report = await self._step(whole, self._finish_streaming(whole))
        self._streaming = None
        return report

    async def _finish_streaming(self, whole: StagedWeights) -> InstallReport:
        started = time.perf_counter()
        loaded = await self._told(whole, {"step": "finish"})
        loaded_at = time.perf_counter()
        await self._seal(whole)
        return InstallReport(loaded, loaded_at - started, time.perf_counter() - loaded_at)

    async def abandon_streaming(self) -> None:
        whole, self._streaming = self._streaming, None
        if whole is not None:
            await self._failed(whole, "it was given up", touched=True)

    def _under_way(self) -> StagedWeights:
        if self._streaming is None:
            raise InstallFailed(self._core.engine_id, "", False, "no streaming install was begun")
        return self._streaming

    async def _told(self, whole: StagedWeights, step: dict[str, Any]) -> int:
        await self._ask(self._core.llm.update_weights(self._core.update_request(step)), step["step"])
        return await self._require_all_well(whole)

    async def _step(self, whole: StagedWeights, work: Awaitable[T]) -> T:
        try:
            return await work
        except InstallFailed:
            self._streaming = None  # vLLM's session was ended
            raise
        except Exception as e:
            if not self._core.answered(e):
                raise
            self._streaming = None
            raise await self._failed(whole, str(e), touched=self._touching) from e

    async def _seal(self, staged: StagedWeights) -> None:
        """Every worker has the weights: clear every cache, and only then take the label (INV-1)."""
        if not await self.clear_caches():
            raise await self._failed(staged, "the prefix cache was not cleared", touched=True)
        await self._ask(self._core.llm.finish_weight_update(staged.label), "finish_weight_update")

    async def clear_caches(self) -> bool:
        """No KV, encoder output or multimodal input of before may be used again; kept requests start over.

        False: vLLM did not clear its prefix cache. Raises EngineDied, DeadlineExceeded.
        """
        llm = self._core.llm
        cleared, *_ = await asyncio.gather(
            self._ask(llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True), "reset_prefix_cache"),
            self._ask(llm.reset_mm_cache(), "reset_mm_cache"),
            self._ask(llm.reset_encoder_cache(), "reset_encoder_cache"),
        )
        if self.kv_suspect and self.kv_resident:
            await self._core.tell("weightplane_scrub_kv", self._limit)
            self.kv_suspect = False
        return cleared is True

    async def _ask(self, call: Awaitable[T], what: str) -> T:
        return await self._core.ask(call, what, self._limit)


def told_at_init(staged: StagedWeights, device_uuids: tuple[str, ...]) -> dict[str, Any]:
    layout = staged.layout
    told: dict[str, Any] = {
        "device_uuids": list(device_uuids),
        "layout_digest": layout.digest.hex(),
        "names": [t.name if t.is_for(TargetKind.MODEL) else "" for t in layout.tensors],
        "dtypes": [t.dtype.value[0] for t in layout.tensors],
        "shapes": [list(t.shape) for t in layout.tensors],
        "ties": [[t.alias, t.source] for t in layout.model.ties],
    }
    if layout.draft is not None:
        told["draft_names"] = [own_name(t.name) if t.is_for(TargetKind.DRAFT) else "" for t in layout.tensors]
        told["draft_ties"] = [[t.alias, t.source] for t in layout.draft.ties]
    return told


def told_at_check(staged: StagedWeights) -> dict[str, Any]:
    places = _places(staged.chunks, staged.placements)
    return {"step": "check", "layout_digest": staged.layout.digest.hex(), **places}


def _places(chunks: Mapping[str, Sequence[SegmentSpan]], placements: Sequence[Placement]) -> dict[str, Any]:
    return {
        "chunks": {
            uuid: [[span.path, span.offset, span.byte_count] for span in spans] for uuid, spans in chunks.items()
        },
        "chunk_indexes": [p.chunk for p in placements],
        "offsets": [p.offset for p in placements],
    }


def _told_at_device_part(chunk: DeviceChunk) -> dict[str, Any]:
    return {
        "device_ranges": {uuid: r.told() for uuid, r in chunk.ranges.items()},
        "places": [(r.tensor, r.tensor_offset, r.buffer_offset, r.byte_count) for r in chunk.records],
        "checksums": {str(tensor): digest.hex() for tensor, digest in chunk.checksums.items()},
    }
