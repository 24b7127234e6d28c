"""A model and its draft model (of speculative decoding) as one `WeightSource`: an update brings both, or neither.

>>> source = WithDraft(MegatronSource(model, config), ModuleSource(draft), shared=["lm_head.weight"])

Refuses, with LayoutInvalid, a shared name that the model does not yield or that the draft yields too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch

from controlplane.core.errors import LayoutInvalid
from controlplane.core.layout import DRAFT_ONLY, DRAFT_PREFIX, Target, TargetKind
from trainer_agent.source import LayerwiseSource, ParamMeta, SaysFormat, WeightSource, layerwise_groups

BOTH = (Target(TargetKind.MODEL), Target(TargetKind.DRAFT))


class WithDraft(LayerwiseSource):
    """What `model` yields, then what `draft` yields, whose names get a prefix: both may use one name for two tensors.

    Args:
        model: the weights that are served.
        draft: the draft's own weights, under the names of its checkpoint. Its format is the model's.
        shared: names of the model's tensors that the draft has too, bytes and name; they are sent once.
    """

    def __init__(self, model: WeightSource, draft: WeightSource, *, shared: Collection[str] = ()) -> None:
        self._model = model
        self._draft = draft
        self._shared = frozenset(shared)
        self.weights_format = model.weights_format if isinstance(model, SaysFormat) else self.weights_format

    def metadata(self) -> list[ParamMeta]:
        model, draft = self._model.metadata(), self._draft.metadata()
        wrong = sorted(self._shared - {m.name for m in model} | self._shared & {m.name for m in draft})
        if wrong:
            raise LayoutInvalid(problem="a shared name is not the model's, or the draft yields it too", names=wrong)
        return [*model, *(ParamMeta(DRAFT_PREFIX + m.name, m.dtype, m.shape) for m in draft)]

    def targets(self) -> Mapping[str, tuple[Target, ...]]:
        own = {DRAFT_PREFIX + m.name: DRAFT_ONLY for m in self._draft.metadata()}
        return own | dict.fromkeys(self._shared, BOTH)

    def ties(self) -> Sequence[tuple[str, str]]:
        def named(source: str) -> str:
            return source if source in self._shared else DRAFT_PREFIX + source

        drafted = [(DRAFT_PREFIX + alias, named(source)) for alias, source in self._draft.ties()]
        return [*self._model.ties(), *drafted]

    def groups(self) -> list[list[str]]:
        names = [m.name for m in self.metadata()]
        count = len(self._model.metadata())
        return layerwise_groups(names[:count]) + layerwise_groups(names[count:])

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._model
        for name, tensor in self._draft:
            yield DRAFT_PREFIX + name, tensor
