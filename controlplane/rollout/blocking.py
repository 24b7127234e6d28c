"""`RolloutClient` for code without an event loop: the same calls, each of which waits for its end.

Its own loop runs in a thread of its own; any number of threads may call.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Coroutine, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from controlplane.core.lag import Commits
from controlplane.core.sampling import SamplingSettings
from controlplane.rollout.client import RolloutClient
from controlplane.rollout.routing import Routes
from controlplane.rollout.sample import Sample, Scores

T = TypeVar("T")

CLOSE_SECONDS = 10.0


class BlockingRolloutClient:
    """A context manager. Takes what `RolloutClient` takes, and raises what it raises.

    >>> with BlockingRolloutClient("coordinator:7070") as rollouts:
    ...     sample = rollouts.generate(prompt_token_ids, SamplingSettings(max_tokens=32))
    """

    def __init__(self, coordinator: str, **options: Any) -> None:
        self._coordinator = coordinator
        self._options = options
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weightplane-rollouts", daemon=True)
        self._client: RolloutClient

    def __enter__(self) -> Self:
        self._thread.start()
        self._client = self._wait(self._open())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._wait(self._client.__aexit__(kind, error, trace))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)
        self._loop.close()

    async def _open(self) -> RolloutClient:
        return await RolloutClient(self._coordinator, **self._options).__aenter__()

    @property
    def routes(self) -> Routes | None:
        return self._client.routes

    @property
    def commits(self) -> Commits:
        return self._client.commits

    def generate(self, prompt_token_ids: Sequence[int], sampling: SamplingSettings, **options: Any) -> Sample:
        """See `RolloutClient.generate`."""
        return self._wait(self._client.generate(prompt_token_ids, sampling, **options))

    def generate_batch(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingSettings, **options: Any
    ) -> list[list[Sample]]:
        """See `RolloutClient.generate_batch`."""
        return self._wait(self._client.generate_batch(prompts, sampling, **options))

    def score(self, token_ids: Sequence[int], **options: Any) -> Scores:
        """See `RolloutClient.score`."""
        return self._wait(self._client.score(token_ids, **options))

    def abort(self, request_ids: Collection[str] | None = None) -> None:
        """See `RolloutClient.abort`."""
        self._wait(self._client.abort(request_ids))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Ctrl-C here ends the work there too."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise
