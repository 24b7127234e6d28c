"""Inside vLLM's workers: the weight transfer engine of Weightplane, one per worker.

One session is vLLM's own start_weight_update, update_weights("check"), update_weights("install"),
finish_weight_update. It promises:

- start touches nothing, and "check" maps and measures everything that "install" will read (INV-4);
- every byte is installed inside the one "install" call: layerwise reload is opened, loaded, checked for
  completeness and closed there, so finish has nothing left that could fail;
- on an error vLLM's layers are closed again, so that the next full update starts clean;
- an error is kept as a result for `weightplane_result` instead of raised: vLLM would turn it into untyped
  text, and one rank's exception would put the ranks' replies out of step;
- staged memory is not read any more when "install" returns (INV-12).

A streaming install has "begin", "part" for each part, and "finish" in their place; see `streamed`.

It refuses a layout it was not told of, and an install without its check.
"""

from __future__ import annotations

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
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info
from vllm.platforms import current_platform

from controlplane import failpoints
from engine_agent.vllm.experts import experts_packed_anew
from engine_agent.vllm.mapping import DTYPES, MappedChunks, StagingError
from engine_agent.vllm.streamed import StreamedReload

NAMES_SHOWN = 5


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The layout, sent once, and whose device each worker has."""

    device_uuids: list[str]
    layout_digest: str
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    ties: list[list[str]]
    """Pairs of alias and source."""


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
    supports_draft_weight_update = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.result = StepResult()
        self._init: InitInfo | None = None
        self._update: UpdateInfo | None = None
        self._chunks: MappedChunks | None = None
        self._streamed: StreamedReload | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        if not len(init_info.names) == len(init_info.dtypes) == len(init_info.shapes):
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
                    self._install()
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
        self._drop_staged()

    def result_dict(self) -> dict[str, Any]:
        return asdict(self.result) | {"rank": self.parallel_config.rank}

    # ---- check ------------------------------------------------------------------------------

    def _told(self, layout_digest: str) -> InitInfo:
        if self._init is None or layout_digest != self._init.layout_digest:
            raise StagingError(f"layout {layout_digest} was not sent to this worker")
        return self._init

    def _check(self, update: UpdateInfo) -> None:
        init = self._told(update.layout_digest)
        if not len(update.chunk_indexes) == len(update.offsets) == len(init.names):
            raise StagingError(f"{len(update.offsets)} placements for a layout of {len(init.names)} tensors")
        self._chunks = self._mapped(init, update)
        for dtype, shape, chunk, offset in zip(
            init.dtypes, init.shapes, update.chunk_indexes, update.offsets, strict=True
        ):
            self._chunks.locate(DTYPES[dtype], shape, chunk, offset)
        self._update = update

    def _mapped(self, init: InitInfo, update: UpdateInfo) -> MappedChunks:
        uuid = init.device_uuids[self.parallel_config.rank]
        spans = update.chunks.get(uuid, update.chunks.get(""))
        if spans is None:
            raise StagingError(f"no chunks for device {uuid}; there are some for {', '.join(update.chunks)}")
        return MappedChunks([(path, offset, count) for path, offset, count in spans])

    # ---- streaming --------------------------------------------------------------------------

    def _begin(self, update: UpdateInfo) -> None:
        init = self._told(update.layout_digest)
        close_open_layers(self.model)
        self.result.touched = True  # from here on the old weights are not certainly whole (INV-1, INV-4)
        aliases = aliases_of(init.ties, tied=self._tied)
        self._streamed = StreamedReload(self.model, self.model_config, aliases, close_open_layers)
        self._streamed.open()

    def _part(self, update: UpdateInfo) -> None:
        self.result.touched = True
        init, streamed = self._init, self._streamed
        if init is None or streamed is None:
            raise StagingError("a part without its begin")
        self._chunks = self._mapped(init, update)
        for tensor, chunk, offset in zip(update.tensors, update.chunk_indexes, update.offsets, strict=True):
            failpoints.hit("worker.install", streamed.count)
            view = self._chunks.tensor(DTYPES[init.dtypes[tensor]], init.shapes[tensor], chunk, offset)
            streamed.load(init.names[tensor], view)
            del view
        self.result.loaded = streamed.count

    def _finish(self) -> None:
        self.result.touched = True
        if self._streamed is None:
            raise StagingError("a finish without its begin")
        needed, loaded = self._streamed.needed, self._streamed.loaded
        self._check_complete(needed, loaded)
        self._streamed.finish()
        self.result.loaded, self._streamed = self._streamed.count, None
        self._repair_tied_head()

    def _close_streamed(self) -> None:
        """What was not finished is a mixture; its layers are closed, so that the next full update starts clean."""
        streamed, self._streamed = self._streamed, None
        if streamed is not None:
            streamed.abandon()

    # ---- install ----------------------------------------------------------------------------

    def _install(self) -> None:
        if self._update is None or self._chunks is None:
            raise StagingError("install without a check that passed")
        needed = {name for name, _ in self.model.named_parameters()}
        close_open_layers(self.model)
        self.result.touched = True  # from here on the old weights are not certainly whole (INV-1, INV-4)
        initialize_layerwise_reload(self.model)
        with experts_packed_anew(self.model):
            try:
                loaded = self.model.load_weights(self._weights())
                self._check_complete(needed, loaded)
                finalize_layerwise_reload(self.model, self.model_config)
            except BaseException:
                close_open_layers(self.model)
                raise
        self._repair_tied_head()

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        init, update, chunks = self._init, self._update, self._chunks
        if init is None or update is None or chunks is None:
            raise StagingError("nothing is staged")
        aliases = aliases_of(init.ties, tied=self._tied)
        for i, name in enumerate(init.names):
            failpoints.hit("worker.install", i)
            tensor = chunks.tensor(DTYPES[init.dtypes[i]], init.shapes[i], update.chunk_indexes[i], update.offsets[i])
            yield name, tensor
            for alias in aliases.get(name, ()):
                yield alias, tensor
            self.result.loaded = i + 1
        failpoints.hit("worker.install", len(init.names))

    def _check_complete(self, needed: set[str], loaded: set[str] | None) -> None:
        """INV-1: a layer that was given too little would be finished with memory that nobody wrote."""
        if loaded is None or self.model_config.quantization is not None:
            return  # this model does not say, or renames its parameters when it packs them
        missing = sorted(needed - loaded)
        if missing:
            shown = ", ".join(missing[:NAMES_SHOWN])
            raise ValueError(f"{len(missing)} parameters of the model were not loaded: {shown}")

    @property
    def _tied(self) -> bool:
        return bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))

    def _repair_tied_head(self) -> None:
        """On a CPU a tied head computes with a packed copy of the embedding, which layerwise reload leaves old."""
        head = getattr(self.model, "lm_head", None)
        method = getattr(head, "quant_method", None)
        if self._tied and current_platform.is_cpu() and method is not None:
            method.process_weights_after_loading(head)

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


def aliases_of(ties: list[list[str]], *, tied: bool) -> dict[str, list[str]]:
    """By source. A tied model takes its head from the source by itself."""
    aliases: dict[str, list[str]] = {}
    for alias, source in () if tied else ties:
        aliases.setdefault(source, []).append(alias)
    return aliases


def close_open_layers(model: torch.nn.Module) -> None:
    """Undo initialize_layerwise_reload for every layer that is still open, and forget what was buffered for it.

    A layer that was already whole keeps its new weights: the model is a mixture then, until a full update.
    """
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if not info.can_load():
            continue
        if info.kernel_tensors is not None:
            _place_kernel_tensors(layer, info)
        info.reset()
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload
