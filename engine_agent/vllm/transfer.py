"""Inside vLLM's workers: the weight transfer engine of Weightplane, one per worker.

One session is vLLM's own start_weight_update, update_weights("check"), update_weights("install"),
finish_weight_update; start_draft_weight_update where the update is for the draft model too. It promises:

- start touches nothing, and "check" maps and measures everything that "install" will read (INV-4);
- every byte is installed inside the one "install" call: layerwise reload is opened, loaded, checked for
  completeness and closed there, so finish has nothing left that could fail; the served model and its draft alike;
- on an error vLLM's layers are closed again, so that the next full update starts clean;
- an error is kept as a result for `weightplane_result` instead of raised: vLLM would turn it into untyped
  text, and one rank's exception would put the ranks' replies out of step;
- staged memory is not read any more when "install" returns (INV-12).

A streaming install has "begin", "part" for each part, and "finish" in their place; see `streamed`.

It refuses a layout it was not told of, and an install without its check.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from controlplane import failpoints
from controlplane.core.errors import IpcNotPossible
from controlplane.device_memory.cuda import CudaMemory
from controlplane.device_memory.ranges import ExportedProbe, ExportedRange
from engine_agent.kept_maps import KeptMaps
from engine_agent.vllm.cuda_ipc import ArrivingTensors, OpenedExports
from engine_agent.vllm.loading import Loader
from engine_agent.vllm.mapping import DTYPES, MappedChunks, StagingError
from engine_agent.vllm.ranks import rank_in_engine
from engine_agent.vllm.streamed import StreamedReload


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The layout, sent once, and whose device each worker has."""

    device_uuids: list[str]
    layout_digest: str
    names: list[str]
    """In the served model; "": it is the draft's alone."""
    dtypes: list[str]
    shapes: list[list[int]]
    ties: list[list[str]]
    """Pairs of alias and source."""
    draft_names: list[str] = field(default_factory=list)
    """In the draft model; "": it is the served model's alone. Empty: the layout leaves the draft as it is."""
    draft_ties: list[list[str]] = field(default_factory=list)


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One step of an install. Only "check" carries the staged version."""

    step: str
    layout_digest: str = ""
    chunks: dict[str, list[tuple[str, int, int]]] = field(default_factory=dict)
    """Device UUID, or "" for any, to spans of (path, offset, byte count)."""
    chunk_indexes: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    """Entry i of both places tensor i of the layout; of "part": tensor `tensors[i]`."""
    tensors: list[int] = field(default_factory=list)
    device_ranges: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of a "part" in device memory: by device UUID, where its bytes lie. The next two are of it too."""
    places: list[tuple[int, int, int, int]] = field(default_factory=list)
    """See `cuda_ipc.Place`."""
    checksums: dict[str, str] = field(default_factory=dict)
    """Of the tensors that are whole with it; in hexadecimal, by number."""
    install_id: str = ""
    """"install" installs what the "check" of the same id staged, and nothing else: a step that comes late, of an agent
    that is gone, must not take another's place."""


@dataclass
class StepResult:
    """What the last step did in this worker."""

    ok: bool = True
    touched: bool = False
    """A byte may have been installed, and was not certainly put back."""
    cause: str = ""
    loaded: int = 0
    seconds: float = 0.0


class WeightplaneTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.result = StepResult()
        self._init: InitInfo | None = None
        self._update: UpdateInfo | None = None
        self._chunks: MappedChunks | None = None
        self._kept = KeptMaps(private=True)
        self._streamed: StreamedReload | None = None
        self._exports = OpenedExports(CudaMemory(), "")
        self._exports_cause = ""
        self._arriving: ArrivingTensors | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        drafted = len(init_info.draft_names) or len(init_info.names)
        if not len(init_info.names) == len(init_info.dtypes) == len(init_info.shapes) == drafted:
            raise ValueError("names, dtypes and shapes of a layout have one length")
        self._init = init_info

    def start_weight_update(self) -> None:
        self._drop_staged()
        self._close_streamed()
        self.result = StepResult()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        started = time.perf_counter()
        self.result = StepResult()
        try:
            match update_info.step:
                case "check":
                    self._check(update_info)
                case "begin":
                    self._begin(update_info)
                case "part":
                    self._part(update_info)
                case "finish":
                    self._finish()
                case _:
                    self._install(update_info.install_id)
        except Exception as e:  # the boundary of this process: the agent reads it as a result
            self.result.ok = False
            self.result.cause = f"{type(e).__name__}: {e}"
            e.__traceback__ = None  # its frames hold views of staged memory
        if not self.result.ok or update_info.step != "check":
            self._release()
        if not self.result.ok:
            self._close_streamed()
        self.result.seconds = time.perf_counter() - started

    def finish_weight_update(self) -> None:
        self._drop_staged()
        self._close_streamed()

    def shutdown(self) -> None:
        self._exports.close()
        self._drop_staged()
        self._kept.close()

    def result_dict(self) -> dict[str, Any]:
        return asdict(self.result) | {"rank": rank_in_engine(self.parallel_config)}

    # ---- device memory ----------------------------------------------------------------------

    def open_exports(self, exports: list[dict[str, Any]], engine_id: str) -> None:
        """Entry i is of the worker of rank i; none: close what is open. What went wrong is in `exports_dict`."""
        self._exports_cause, self._exports.engine_id = "", engine_id
        if not exports:
            self._exports.close()
            return
        try:
            self._exports.open(ExportedProbe.heard(exports[rank_in_engine(self.parallel_config)]))
        except IpcNotPossible as error:
            self._exports_cause = error.cause

    def exports_dict(self) -> dict[str, Any]:
        return {"rank": rank_in_engine(self.parallel_config), "cause": self._exports_cause}

    # ---- check ------------------------------------------------------------------------------

    def _told(self, layout_digest: str) -> InitInfo:
        if self._init is None or layout_digest != self._init.layout_digest:
            raise StagingError(f"layout {layout_digest} was not sent to this worker")
        return self._init

    def _check(self, update: UpdateInfo) -> None:
        init = self._told(update.layout_digest)
        if bool(init.draft_names) != (self.model is not self._default_model):
            raise StagingError("the session's target is not the layout's")
        if not len(update.chunk_indexes) == len(update.offsets) == len(init.names):
            raise StagingError(f"{len(update.offsets)} placements for a layout of {len(init.names)} tensors")
        self._chunks = self._mapped(init, update)
        for dtype, shape, chunk, offset in zip(
            init.dtypes, init.shapes, update.chunk_indexes, update.offsets, strict=True
        ):
            self._chunks.locate(DTYPES[dtype], shape, chunk, offset)
        self._update = update

    def _mapped(self, init: InitInfo, update: UpdateInfo) -> MappedChunks:
        uuid = init.device_uuids[rank_in_engine(self.parallel_config)]
        spans = update.chunks.get(uuid, update.chunks.get(""))
        if spans is None:
            raise StagingError(f"no chunks for device {uuid}; there are some for {', '.join(update.chunks)}")
        return MappedChunks([(path, offset, count) for path, offset, count in spans], self._kept)

    # ---- streaming --------------------------------------------------------------------------

    def _begin(self, update: UpdateInfo) -> None:
        init = self._told(update.layout_digest)
        if init.draft_names:
            raise StagingError("a draft model is installed with its model in one step, and not in parts")
        loader = Loader(self._default_model, self._default_model_config)
        self.result.touched = True  # from here on the old weights are not certainly whole (INV-1, INV-4)
        self._streamed = StreamedReload(loader, aliases_of([] if loader.tied else init.ties))
        self._arriving = ArrivingTensors(
            init.names, [DTYPES[d].itemsize * math.prod(s) for d, s in zip(init.dtypes, init.shapes, strict=True)]
        )
        self._streamed.open()

    def _part(self, update: UpdateInfo) -> None:
        self.result.touched = True
        init, streamed = self._init, self._streamed
        if init is None or streamed is None:
            raise StagingError("a part without its begin")
        if update.device_ranges:
            self._device_part(init, update, streamed)
            return
        self._chunks = self._mapped(init, update)
        for tensor, chunk, offset in zip(update.tensors, update.chunk_indexes, update.offsets, strict=True):
            failpoints.hit("worker.install", streamed.count)
            view = self._chunks.tensor(DTYPES[init.dtypes[tensor]], init.shapes[tensor], chunk, offset)
            streamed.load(init.names[tensor], view)
            del view
        self.result.loaded = streamed.count

    def _device_part(self, init: InitInfo, update: UpdateInfo, streamed: StreamedReload) -> None:
        """A chunk in the memory of the rank on this device; on return nothing reads it any more (INV-12)."""
        assert self._arriving is not None, "it is made with what was begun"
        told = update.device_ranges[init.device_uuids[rank_in_engine(self.parallel_config)]]
        checksums = {int(tensor): bytes.fromhex(digest) for tensor, digest in update.checksums.items()}
        arrived = self._arriving.take(self._exports, ExportedRange.heard(told), update.places, checksums)
        for tensor, data in arrived:
            failpoints.hit("worker.install", streamed.count)
            whole = data.view(DTYPES[init.dtypes[tensor]]).reshape(init.shapes[tensor])
            streamed.load(init.names[tensor], whole, own=True)
        self.result.loaded = streamed.count

    def _finish(self) -> None:
        self.result.touched = True
        if self._streamed is None:
            raise StagingError("a finish without its begin")
        self._streamed.finish()
        self.result.loaded, self._streamed, self._arriving = self._streamed.count, None, None

    def _close_streamed(self) -> None:
        """What was not finished is a mixture; its layers are closed, so that the next full update starts clean."""
        streamed, self._streamed, self._arriving = self._streamed, None, None
        if streamed is not None:
            streamed.abandon()

    # ---- install ----------------------------------------------------------------------------

    def _install(self, install_id: str) -> None:
        init, update = self._init, self._update
        if init is None or update is None or self._chunks is None:
            raise StagingError("install without a check that passed")
        if update.install_id != install_id:
            raise StagingError(f"install {install_id} without its own check; {update.install_id} was checked last")
        served = Loader(self._default_model, self._default_model_config)
        loads = [(served, init.names, init.ties)]
        if init.draft_names:
            loads.append((Loader(self.model, self.model_config), init.draft_names, init.draft_ties))
        self.result.touched = True  # from here on the old weights are not certainly whole (INV-1, INV-4)
        for loader, names, ties in loads:
            loader.load(self._weights(names, [] if loader.tied else ties))

    def _weights(self, names: list[str], ties: list[list[str]]) -> Iterator[tuple[str, torch.Tensor]]:
        """What the layout has for one model, under that model's names."""
        init, update, chunks = self._init, self._update, self._chunks
        if init is None or update is None or chunks is None:
            raise StagingError("nothing is staged")
        aliases = aliases_of(ties)
        own = [(i, name) for i, name in enumerate(names) if name]
        for i, name in own:
            failpoints.hit("worker.install", i)
            tensor = chunks.tensor(DTYPES[init.dtypes[i]], init.shapes[i], update.chunk_indexes[i], update.offsets[i])
            yield name, tensor
            for alias in aliases.get(name, ()):
                yield alias, tensor
            self.result.loaded = max(self.result.loaded, i + 1)
        failpoints.hit("worker.install", own[-1][0] + 1 if own else 0)

    # ---- letting go -------------------------------------------------------------------------

    def _release(self) -> None:
        """INV-12: when this worker has answered, nobody reads staged memory any more."""
        try:
            self._drop_staged()
        except BufferError:
            self.result.ok, self.result.touched = False, True
            self.result.cause = "; ".join(filter(None, [self.result.cause, "the model still reads staged memory"]))

    def _drop_staged(self) -> None:
        chunks, self._chunks, self._update = self._chunks, None, None
        if chunks is not None:
            chunks.close()


def aliases_of(ties: list[list[str]]) -> dict[str, list[str]]:
    """By source."""
    aliases: dict[str, list[str]] = {}
    for alias, source in ties:
        aliases.setdefault(source, []).append(alias)
    return aliases
