"""slime's and vime's rollout functions over `RolloutClient`: engines of a fleet in place of a router.

    --rollout-function-path controlplane.rollout.adapters.slime.generate_rollout          the whole rollout, or only
    --custom-generate-function-path controlplane.rollout.adapters.slime.generate          each sample of it

The coordinator is `args.weightplane_coordinator`, or WEIGHTPLANE_COORDINATOR in the environment. What they promise
beside the shape: `weight_versions` says which versions made a sample's tokens, in order, and `metadata` where the
borders lie. A sample that an update cuts, or whose engine dies, goes on from its tokens under the version served then;
one with stop strings begins anew, since a string may lie across the cut.

With `--partial-rollout`, samples that are not done when the batch is full come back with their tokens to the data
source, and go on in a later rollout. `--mask-offpolicy-in-partial-rollout` masks by span: what another version made
than the sample's last. `args.weightplane_max_lag` masks what is more fleet commits behind.
"""

from __future__ import annotations

import asyncio
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakKeyDictionary

from controlplane.core.errors import InvalidRequest, WeightplaneError
from controlplane.core.sampling import SamplingSettings
from controlplane.rollout.adapters.slime_options import coordinator_of, prompt_ids_of, tokenizer_of
from controlplane.rollout.adapters.slime_rollout import CUT_SECONDS, Group, Rollout
from controlplane.rollout.adapters.slime_sample import append, check, check_goes_on, settings_of
from controlplane.rollout.asking import OnLoss, unresumable
from controlplane.rollout.client import RolloutClient
from controlplane.rollout.sample import Sample

WAIT_SECONDS = 600.0
"""For an engine: longer than a new one takes to start."""
SAMPLE_SECONDS = 3600.0
"""For a whole sample, unless `args.weightplane_sample_seconds` says otherwise."""

_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, RolloutClient] = WeakKeyDictionary()
"""One for each event loop that asked; it lives as long as its loop."""


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Generate one sample, or go on with one that was aborted; the same object comes back.

    Cancelled, it ends the request in its engine, and the sample keeps the tokens that it has.

    Raises:
        InvalidRequest: the sample, or a sampling parameter, cannot be served truthfully; no engine was asked.
        What `RolloutClient.generate` raises.
    """
    check(sample)
    settings = settings_of(sampling_params, sample.response_length)
    check_goes_on(sample, settings)
    if settings.max_tokens == 0:
        sample.status = type(sample.status)("truncated")
        return sample
    if not sample.tokens:
        sample.tokens = prompt_ids_of(args, sample.prompt)
    try:
        made = await _made(await _client(args), sample, settings)
    except _Cut as cut:
        _take(args, sample, cut.made, sampling_params)
        raise asyncio.CancelledError from None
    _take(args, sample, made, sampling_params)
    return sample


generate.abort_mode = "request"  # type: ignore[attr-defined]  # their rollouts cut it by cancelling its task


class _Cut(Exception):
    """The task was cancelled; its sample came back from the engine all the same."""

    def __init__(self, made: Sample) -> None:
        super().__init__()
        self.made = made


async def _made(client: RolloutClient, sample: Any, settings: SamplingSettings) -> Sample:
    """Raises _Cut when its task is cancelled and the engine gave back what it had; else what generate raises."""
    name, session = uuid.uuid4().hex, sample.session_id or ""
    on_loss: OnLoss = "restart" if unresumable(settings) else "resume"
    asking = asyncio.ensure_future(
        client.generate(sample.tokens, settings, session_id=session, request_id=name, on_loss=on_loss)
    )
    try:
        return await asyncio.shield(asking)
    except asyncio.CancelledError:
        try:
            async with asyncio.timeout(CUT_SECONDS):
                await client.abort([name])
                raise _Cut(await asking) from None
        except (WeightplaneError, TimeoutError):
            asking.cancel()
        raise


def _take(args: Any, sample: Any, made: Sample, sampling_params: dict[str, Any]) -> None:
    append(sample, made)
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    skip = bool(sampling_params.get("skip_special_tokens"))
    sample.response = tokenizer_of(args.hf_checkpoint).decode(response, skip_special_tokens=skip)


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
    if args.partial_rollout and args.rollout_stop:
        problem = "a string that lies across the cut would be missed; use rollout_stop_token_ids, or whole rollouts"
        raise InvalidRequest(field="args.rollout_stop", problem=problem)
    with ThreadPoolExecutor(1) as thread:  # a loop of its own, whether or not one runs here
        return thread.submit(asyncio.run, _rolled_out(args, Rollout(args, rollout_id, data_source, generate))).result()


async def _rolled_out(args: Any, rollout: Rollout) -> list[Group]:
    async with _new_client(args) as client:
        _clients[asyncio.get_running_loop()] = client
        return await rollout.run(client)


def _new_client(args: Any) -> RolloutClient:
    seconds = getattr(args, "weightplane_sample_seconds", None) or SAMPLE_SECONDS
    return RolloutClient(coordinator_of(args), wait_seconds=WAIT_SECONDS, deadline_seconds=float(seconds))


async def _client(args: Any) -> RolloutClient:
    """This loop's. One that `generate_rollout` did not open lives as long as its loop."""
    loop = asyncio.get_running_loop()
    if loop not in _clients:
        _clients[loop] = _new_client(args)
        await _clients[loop].__aenter__()
    return _clients[loop]
