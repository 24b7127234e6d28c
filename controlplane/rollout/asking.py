"""One request of a caller, over all engines that it is tried on, and what is asked of the next one after a loss.

`resume` and `prefix` go on at another engine from the tokens that came: they are the end of its prompt, so what it
draws next has the distribution that it would have had. It cannot have it where sampling looks at generated tokens apart
from the prompt (penalties, stop strings, grammars): such a request is refused beforehand.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Literal

from controlplane.core import errors as e
from controlplane.core.sample_spans import ABORTED, is_cut
from controlplane.core.sampling import SamplingSettings
from controlplane.core.versions import EngineId
from controlplane.rollout.choosing import Search
from controlplane.rollout.sample import Assembly, Delta, Ending, Sample
from controlplane.rpc.codec import pin_to_proto, sampling_to_proto
from weightplane.v1 import rollout_pb2

OnLoss = Literal["resume", "restart", "fail"]
"""What becomes of a sample whose engine went away, or cut it for an update, once it has tokens."""
BLIND = frozenset(
    {
        "allowed_token_ids",
        "flat_logprobs",
        "include_stop_str_in_output",
        "logit_bias",
        "routed_experts_prompt_start",
        "skip_reading_prefix_cache",
        "skip_special_tokens",
        "spaces_between_special_tokens",
    }
)
"""Fields of vLLM's, given by name, that draw a token without a look at those before it. Of any other name nobody here
knows that."""


@dataclass(slots=True, kw_only=True)
class Ask(Search):
    """A request, its search for an engine, and what came of it so far."""

    prompt: tuple[int, ...]
    sampling: SamplingSettings
    assembly: Assembly
    prefix: Sample | None
    on_loss: OnLoss
    patience_seconds: float

    @property
    def has_begun(self) -> bool:
        """It has tokens of its own, beside its prefix's."""
        return len(self.assembly.tokens) > (0 if self.prefix is None else len(self.prefix.tokens))

    def request(self) -> rollout_pb2.GenerateRequest:
        """For the next engine. Raises InvalidRequest for values that no message can hold."""
        done = self.assembly.tokens
        rest = replace(
            self.sampling,
            max_tokens=self.sampling.max_tokens - len(done),
            min_tokens=max(0, self.sampling.min_tokens - len(done)),
            seed=None if self.sampling.seed is None else self.sampling.seed + len(done),
        )
        try:
            return rollout_pb2.GenerateRequest(
                model=self.model,
                request_id=self.assembly.request_id,
                prompt_token_ids=(*self.prompt, *done),
                sampling=sampling_to_proto(rest),
                pin=pin_to_proto(self.pin),
                priority=self.sampling.priority,
                session_id=self.session_id,
            )
        except (TypeError, ValueError) as error:
            raise e.InvalidRequest(field="prompt_token_ids or sampling", problem=str(error)) from error

    def lost(self, error: e.WeightplaneError) -> Delta | None:
        """An engine went away. Raises the error where no other may be asked; a last delta where nothing is left."""
        self.last_error = error
        if not self.has_begun or self.aborted:
            return None
        if self.on_loss == "fail":
            raise error
        self.patience = max(self.patience, time.monotonic() + self.patience_seconds)
        if self.on_loss == "restart":
            again = Assembly(self.assembly.request_id, self.pin, with_logprobs=self.assembly.with_logprobs)
            self.assembly = prefixed(again, self.prefix)
            return None
        return self._full()

    def cut(self, delta: Delta) -> bool:
        """Whether a last delta is not the caller's last: the engine ended it for its own sake, and another goes on."""
        ending = delta.ending
        if ending is None or not is_cut(ending.finish_reason, ending.stop_reason):
            return False
        return self.on_loss != "fail" and len(self.assembly.tokens) < self.sampling.max_tokens

    def ended_by_caller(self) -> Delta:
        """The last delta of one that waited for an engine when its caller ended it."""
        self.assembly.begin_part()
        return Delta(EngineId(""), (), (), None, Ending("abort", ABORTED, (), len(self.prompt), 0))

    def _full(self) -> Delta | None:
        """All tokens had come, only the word that it was the end had not."""
        self.assembly.begin_part()
        if self.assembly.prompt_tokens is None:  # the next engine will count what came so far as prompt
            self.assembly.prompt_tokens = len(self.prompt)
        if len(self.assembly.tokens) < self.sampling.max_tokens:
            return None
        ending = Ending("length", "", (), len(self.prompt), 0)
        return Delta(EngineId(""), (), (), None, ending)


def unresumable(sampling: SamplingSettings) -> list[str]:
    """The fields that would begin anew in the middle of a sample, whose tokens so far are an engine's prompt."""
    own = [name for name in ("presence_penalty", "frequency_penalty") if getattr(sampling, name)]
    extra = [name for name, value in sampling.extra.items() if value is not None and value != []]
    return own + [f"extra.{name}" for name in extra if name not in BLIND]


def check_recovery(sampling: SamplingSettings, on_loss: OnLoss, prefix: Sample | None) -> None:
    """Raises InvalidRequest."""
    goes_on = prefix is not None and len(prefix.tokens) > 0
    names = unresumable(sampling) if goes_on or on_loss == "resume" else []
    if names:
        problem = f"a sample with {', '.join(names)} cannot go on from its tokens: they would count as prompt"
        raise e.InvalidRequest(field="prefix" if goes_on else "on_loss", problem=problem)


def prefixed(assembly: Assembly, prefix: Sample | None) -> Assembly:
    """Goes on from a sample that was cut; its tokens, logprobs and spans are the new one's too."""
    if prefix is not None:
        assembly.tokens, assembly.logprobs = list(prefix.tokens), list(prefix.logprobs)
        assembly.spans, assembly.sampling_masks = list(prefix.spans), list(prefix.sampling_masks)
        assembly.begin_part()
        assembly.prompt_tokens, assembly.cached_prompt_tokens = prefix.prompt_tokens, prefix.cached_prompt_tokens
    return assembly
