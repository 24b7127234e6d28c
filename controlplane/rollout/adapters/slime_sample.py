"""slime's and vime's `Sample`, by its fields: what is asked for of one, and what comes of it.

Promises: what cannot be continued truthfully is refused before an engine is asked; fields of one sample always agree in
length; tokens go behind those that are there (of an earlier part, or of a tool), and `weight_versions` and the spans in
`metadata` say which version made which of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from controlplane.core.errors import InvalidRequest
from controlplane.core.sampling import SamplingSettings
from controlplane.core.versions import Term, WeightVersion
from controlplane.rollout.asking import unresumable
from controlplane.rollout.sample import SPANS_KEY, Sample

_SAME = ("temperature", "top_p", "min_p", "seed", "stop_token_ids", "repetition_penalty", "ignore_eos", "min_tokens")
_RENAMED = {"sampling_seed": "seed", "min_new_tokens": "min_tokens"}
_OF_THE_TEXT = frozenset({"skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"})
"""How an engine would make text of tokens; here tokens come out, with those that ended them."""


def settings_of(sampling_params: Mapping[str, Any], done: int) -> SamplingSettings:
    """Their sampling parameters, for a response of which `done` tokens are there. Raises InvalidRequest by name."""
    given = {name: value for name, value in sampling_params.items() if value is not None}
    left = _taken(given, "max_new_tokens", None)
    if left is None or left < done:
        raise _refused(f"max_new_tokens is {left}, and the response has {done} tokens")
    fields: dict[str, Any] = {"max_tokens": left - done, "top_k": max(0, _taken(given, "top_k", 0))}
    if stop := _taken(given, "stop", None):
        fields["extra"] = {"stop": stop, "include_stop_str_in_output": True}
    for name in [n for n in given if n not in _OF_THE_TEXT]:
        field = _RENAMED.get(name, name)
        if field not in _SAME:
            raise _refused(f"{name} has no place here")
        fields[field] = given[name]
    if "stop_token_ids" in fields:
        fields["stop_token_ids"] = tuple(fields["stop_token_ids"])
    if "seed" in fields:
        fields["seed"] += done
    return SamplingSettings(**fields)


def check(theirs: Any) -> None:
    """Raises InvalidRequest for a sample that cannot be begun or continued."""
    done = theirs.response_length
    if theirs.status.value not in ("pending", "aborted"):
        raise _refused(f"it is {theirs.status.value}: only pending and aborted ones are generated")
    if any(value is not None for value in (theirs.multimodal_inputs or {}).values()):
        raise _refused("multimodal inputs are not carried")
    if done > len(theirs.tokens):
        raise _refused(f"a response of {done} in {len(theirs.tokens)} tokens")
    for name in ("loss_mask", "rollout_log_probs"):
        value = getattr(theirs, name)
        if value is not None and len(value) != done:
            raise _refused(f"{name} has {len(value)} entries for {done} tokens")
    if done and theirs.rollout_log_probs is None:
        raise _refused(f"the {done} tokens of its response have no rollout_log_probs")


def check_goes_on(theirs: Any, settings: SamplingSettings) -> None:
    """Raises InvalidRequest for one that was cut, and would begin anew in its middle."""
    names = unresumable(settings)
    if names and theirs.response_length and theirs.status.value == "aborted":
        raise _refused(f"it was cut, and with {', '.join(names)} it cannot go on from its tokens")


def append(theirs: Any, made: Sample, mask: Sequence[bool] | None = None) -> None:
    """What was made goes behind what is there; `mask` is of what was made."""
    done, fields = theirs.response_length, made.to_slime(theirs.tokens, mask)
    theirs.tokens = fields["tokens"]
    theirs.loss_mask = [*([1] * done if theirs.loss_mask is None else theirs.loss_mask), *fields["loss_mask"]]
    theirs.rollout_log_probs = [*(theirs.rollout_log_probs or []), *(fields["rollout_log_probs"] or [])]
    theirs.response_length = done + fields["response_length"]
    theirs.status = type(theirs.status)(fields["status"])
    spans = theirs.metadata.setdefault(SPANS_KEY, [])
    for number, term, start, end in fields["metadata"][SPANS_KEY]:
        if spans and spans[-1][:2] == [number, term] and spans[-1][3] == done + start:
            spans[-1][3] = done + end
        else:
            spans.append([number, term, done + start, done + end])
            theirs.weight_versions.append(str(number))
    cache = {"cached_tokens": made.cached_prompt_tokens, "prompt_tokens": made.prompt_tokens}
    theirs.prefix_cache_info.add(meta_info=cache)


def mask_spans(theirs: Any, counts: Callable[[WeightVersion], bool]) -> None:
    """Tokens of versions that do not count carry no loss. Where none is left the sample is one to remove."""
    for number, term, start, end in theirs.metadata.get(SPANS_KEY, []):
        if not counts(WeightVersion(number, Term(term))):
            theirs.loss_mask[start:end] = [0] * (end - start)
    if theirs.response_length and not any(theirs.loss_mask):
        theirs.remove_sample = True


def last_version(theirs: Any) -> WeightVersion | None:
    """The one that made the last of its tokens."""
    spans = theirs.metadata.get(SPANS_KEY, [])
    return WeightVersion(spans[-1][0], Term(spans[-1][1])) if spans else None


def _taken(given: dict[str, Any], name: str, default: Any) -> Any:
    return given.pop(name, default)


def _refused(problem: str) -> InvalidRequest:
    return InvalidRequest(field="sample", problem=problem)
