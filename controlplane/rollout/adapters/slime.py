"""slime's and vime's rollout functions over `RolloutClient`: engines of a fleet in place of a router.

    --rollout-function-path controlplane.rollout.adapters.slime.generate_rollout          the whole rollout, or only
    --custom-generate-function-path controlplane.rollout.adapters.slime.generate          each sample of it

The coordinator is `args.weightplane_coordinator`, or WEIGHTPLANE_COORDINATOR in the environment. What they promise
beside the shape: `weight_versions` says which versions made a sample's tokens, in order, and `metadata` where the
borders lie. A sample that an update cuts, or whose engine dies, goes on from its tokens under the version served then.

With `--partial-rollout`, samples that are not done when the batch is full come back with their tokens to the data
source, and go on in a later rollout. `--mask-offpolicy-in-partial-rollout` masks by span: what another version made
than the sample's last. `args.weightplane_max_lag` masks what is more fleet commits behind.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import lru_cache, partial
from importlib import import_module
from operator import eq
from typing import Any
from weakref import WeakKeyDictionary

from controlplane.core.errors import InvalidRequest
from controlplane.rollout.adapters.slime_sample import append, check, last_version, mask_spans, settings_of
from controlplane.rollout.client import RolloutClient

COORDINATOR_VARIABLE = "WEIGHTPLANE_COORDINATOR"
WAIT_SECONDS = 600.0
"""For an engine: longer than a new one takes to start."""
SAMPLE_SECONDS = 3600.0
"""For a whole sample, unless `args.weightplane_sample_seconds` says otherwise."""
CUT_SECONDS = 30.0
"""For samples that were cut to come back."""
CUT_AGAIN_SECONDS = 1.0

Group = list[Any]
"""Samples of one prompt."""

_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, RolloutClient] = WeakKeyDictionary()
"""One for each event loop that asked; it lives as long as its loop."""


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Generate one sample, or go on with one that was aborted; the same object comes back.

    Raises:
        InvalidRequest: the sample, or a sampling parameter, cannot be served truthfully; no engine was asked.
        What `RolloutClient.generate` raises.
    """
    check(sample)
    settings = settings_of(sampling_params, sample.response_length)
    if settings.max_tokens == 0:
        sample.status = type(sample.status)("truncated")
        return sample
    if not sample.tokens:
        sample.tokens = _prompt_ids(args, sample.prompt)
    client = await _client(args)
    made = await client.generate(sample.tokens, settings, session_id=sample.session_id or "", on_loss="resume")
    append(sample, made)
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    skip = bool(sampling_params.get("skip_special_tokens"))
    sample.response = _tokenizer(args.hf_checkpoint).decode(response, skip_special_tokens=skip)
    return sample


async def close() -> None:
    """Close the client that `generate` opened in this event loop; it opens another if it is called again."""
    client = _clients.pop(asyncio.get_running_loop(), None)
    if client is not None:
        await client.__aexit__(None, None, None)


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> list[Group]:
    """`args.rollout_batch_size` whole groups, in the order of their first samples' indexes.

    Groups that were cut are put back with `data_source.add_samples` where `args.partial_rollout` is set, else dropped.

    Raises:
        InvalidRequest: an evaluation, which their own `generate_rollout` does over `generate`, or an option that has no
            place here. What `generate` and the reward function raise.
    """
    if evaluation:
        problem = "evaluations are left to --eval-function-path, with generate as --custom-generate-function-path"
        raise InvalidRequest(field="evaluation", problem=problem)
    if getattr(args, "rollout_all_samples_process_path", None) is not None:
        raise InvalidRequest(field="args.rollout_all_samples_process_path", problem="it has no place here")
    with ThreadPoolExecutor(1) as thread:  # a loop of its own, whether or not one runs here
        return thread.submit(asyncio.run, _Rollout(args, rollout_id, data_source).run()).result()


class _Rollout:
    """One batch in the making."""

    def __init__(self, args: Any, rollout_id: int, data_source: Any) -> None:
        self._args = args
        self._rollout_id = rollout_id
        self._source = data_source
        self._keeps = _loaded(args, "dynamic_sampling_filter_path")
        self._generate = _loaded(args, "custom_generate_function_path") or generate
        self._running: dict[asyncio.Task[Group], Group] = {}

    async def run(self) -> list[Group]:
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(_new_client(self._args))
            _clients[asyncio.get_running_loop()] = client
            try:
                done = await self._full_batch()
                await self._cut(client)
            finally:
                await _cancelled(self._running)
            self._mask(done, client)
        if (choose := _loaded(self._args, "rollout_sample_filter_path")) is not None:
            choose(self._args, done)
        return sorted(done, key=lambda group: group[0].index)

    async def _full_batch(self) -> list[Group]:
        wanted, done = self._args.rollout_batch_size, list[Group]()
        while len(done) < wanted:
            while len(done) + len(self._running) < wanted:
                self._submit(getattr(self._args, "over_sampling_batch_size", None) or wanted)
            finished, _ = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
            for task in finished:
                del self._running[task]
                group = task.result()
                if _unfinished(group):  # an update cut it in a generate function of theirs: it goes on
                    self._begin(group)
                elif self._keep(group):
                    done.append(group)
        self._put_back(done[wanted:])
        return done[:wanted]

    def _submit(self, count: int) -> None:
        groups = self._source.get_samples(count)
        if not groups:
            raise InvalidRequest(field="data_source", problem="it has no samples left")
        for group in groups:
            self._begin(group)

    def _begin(self, group: Group) -> None:
        self._running[asyncio.create_task(self._group(group))] = group

    async def _group(self, group: Group) -> Group:
        try:
            async with asyncio.TaskGroup() as together:
                for sample in group:
                    together.create_task(self._one(sample))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        if self._args.group_rm and not _unfinished(group):
            rewards = await _reward(self._args, group[0])(self._args, group)
            for sample, reward in zip(group, rewards, strict=True):
                sample.reward = reward
        return group

    async def _one(self, sample: Any) -> None:
        if sample.status.value in ("completed", "truncated"):
            return  # it was done before its group was cut
        if await self._generate(self._args, sample, _sampling_params(self._args)) is not sample:
            problem = "it returned another sample than it was given; one that makes several of one has no place here"
            raise InvalidRequest(field="args.custom_generate_function_path", problem=problem)
        if not self._args.group_rm and sample.reward is None and not _unfinished([sample]):
            sample.reward = await _reward(self._args, sample)(self._args, sample)

    def _keep(self, group: Group) -> bool:
        if self._keeps is None:
            return True
        verdict = self._keeps(self._args, group)
        return bool(getattr(verdict, "keep", verdict))

    # ---- what is not done when the batch is full ------------------------------------------------

    async def _cut(self, client: RolloutClient) -> None:
        """Unfinished samples come back with the tokens that they have, and their groups go back whole."""
        if not self._args.partial_rollout or not self._running:
            return
        groups, give_up = list(self._running.values()), time.monotonic() + CUT_SECONDS
        while self._running and time.monotonic() < give_up:  # a generate function of theirs may ask again
            await client.abort()
            ended, _ = await asyncio.wait(self._running, timeout=CUT_AGAIN_SECONDS)
            for task in ended:
                del self._running[task]
                task.result()
        self._put_back(groups)

    def _put_back(self, groups: Sequence[Group]) -> None:
        if not self._args.partial_rollout or not groups:
            return
        for sample in (sample for group in groups for sample in group if sample.response_length):
            sample.metadata.setdefault("start_rollout_id", self._rollout_id)
        self._source.add_samples(list(groups))

    def _mask(self, groups: Sequence[Group], client: RolloutClient) -> None:
        max_lag, commits = getattr(self._args, "weightplane_max_lag", None), client.commits
        for sample in (sample for group in groups for sample in group):
            if self._args.partial_rollout and self._args.mask_offpolicy_in_partial_rollout:
                mask_spans(sample, partial(eq, last_version(sample)))
            if max_lag is not None:
                mask_spans(sample, lambda version: commits.lag(version) <= max_lag)


async def _cancelled(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Nothing runs on in an engine for a batch that is over."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _unfinished(group: Group) -> bool:
    return any(sample.status.value in ("pending", "aborted") for sample in group)


def _sampling_params(args: Any) -> dict[str, Any]:
    """As theirs has them."""
    return {
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
        "top_k": args.rollout_top_k,
        "max_new_tokens": args.rollout_max_response_len,
        "stop": args.rollout_stop,
        "stop_token_ids": args.rollout_stop_token_ids,
        "skip_special_tokens": args.rollout_skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }


def _reward(args: Any, sample: Any) -> Callable[..., Any]:
    """`args.custom_rm_path`, or the reward hub of the project that the sample is of."""
    own = _loaded(args, "custom_rm_path")
    if own is not None:
        return own
    project = type(sample).__module__.partition(".")[0]
    hub = import_module(f"{project}.rollout.rm_hub")
    return hub.batched_async_rm if args.group_rm else hub.async_rm  # type: ignore[no-any-return]


def _loaded(args: Any, name: str) -> Callable[..., Any] | None:
    """A function that an option names as MODULE.FUNCTION."""
    path = getattr(args, name, None)
    if path is None:
        return None
    module, _, function = path.rpartition(".")
    found: Callable[..., Any] = getattr(import_module(module), function)
    return found


def _coordinator(args: Any) -> str:
    found = getattr(args, "weightplane_coordinator", None) or os.environ.get(COORDINATOR_VARIABLE)
    if not found:
        problem = f"neither it nor {COORDINATOR_VARIABLE} in the environment names the coordinator"
        raise InvalidRequest(field="args.weightplane_coordinator", problem=problem)
    return str(found)


def _new_client(args: Any) -> RolloutClient:
    seconds = getattr(args, "weightplane_sample_seconds", None) or SAMPLE_SECONDS
    return RolloutClient(_coordinator(args), wait_seconds=WAIT_SECONDS, deadline_seconds=float(seconds))


async def _client(args: Any) -> RolloutClient:
    """This loop's. One that `generate_rollout` did not open lives as long as its loop."""
    loop = asyncio.get_running_loop()
    if loop not in _clients:
        _clients[loop] = await _new_client(args).__aenter__()
    return _clients[loop]


@lru_cache
def _tokenizer(checkpoint: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=True)


def _prompt_ids(args: Any, prompt: Any) -> list[int]:
    if not isinstance(prompt, str):
        raise InvalidRequest(field="sample.prompt", problem="a conversation; --apply-chat-template makes it a text")
    found: list[int] = _tokenizer(args.hf_checkpoint).encode(prompt, add_special_tokens=False)
    return found
