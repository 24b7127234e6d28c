"""The rollout client: asks the coordinator where, and the engines for tokens. No byte goes through the coordinator.

Promises whole samples whose spans cover their tokens exactly (INV-11), and another engine when one cannot serve. What
becomes of a sample whose engine goes away in mid-way is the caller's to say (`on_loss`); unless told otherwise the
error reaches the caller, since asking again is another sample.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

import grpc
import structlog

from controlplane.core import errors as e
from controlplane.core.lag import Commits
from controlplane.core.pins import Pin
from controlplane.core.sampling import SamplingSettings
from controlplane.core.versions import ModelName, RunId, WeightVersion
from controlplane.rollout.asking import Ask, OnLoss, check_recovery, prefixed
from controlplane.rollout.choosing import Choosing
from controlplane.rollout.connections import Connections
from controlplane.rollout.engine_errors import ELSEWHERE_MAY_DO, engine_error, nothing_came
from controlplane.rollout.policies import LeastLoaded, Policy
from controlplane.rollout.routing import Route, Routes
from controlplane.rollout.running import Running
from controlplane.rollout.sample import Assembly, Delta, Sample, Scores
from controlplane.rollout.watching import RouteWatch
from controlplane.rollout.wire import delta_from_proto
from controlplane.rpc.codec import pin_to_proto, seconds_to_proto, version_from_proto
from controlplane.rpc.security import PLAIN, TlsSettings
from controlplane.rpc.validation import validate
from controlplane.tracing import caller_metadata
from weightplane.v1 import rollout_pb2

log = structlog.get_logger(__name__)

BATCH_AT_ONCE = 1024
"""Requests of a batch that are open at once, unless told otherwise."""


class RolloutClient:
    """Generates on a fleet's engines. An async context manager; one event loop uses it.

    >>> async with RolloutClient("coordinator:7070") as rollouts:
    ...     sample = await rollouts.generate(prompt_token_ids, SamplingSettings(max_tokens=32))
    """

    def __init__(
        self,
        coordinator: str,
        *,
        model: str = "policy",
        run_id: str | None = None,
        wait_seconds: float = 30.0,
        deadline_seconds: float = 300.0,
        policy: Policy | None = None,
        on_loss: OnLoss = "fail",
        include_kept: bool = False,
        tls: TlsSettings = PLAIN,
    ) -> None:
        """`wait_seconds` bounds the wait for an engine that may serve; `deadline_seconds` a whole sample.

        Without `run_id` the client works for whatever run the coordinator leads. `policy`: which of the engines gets a
        request (`LeastLoaded`, `PowerOfTwo`, `BySession`). `on_loss`: what becomes of a sample with tokens whose
        engine goes away, or that an engine cut for an update: `resume` it at another engine from the tokens that it
        has (refused beforehand where sampling looks at what was sampled: penalties, stop strings, …), `restart` it, or
        `fail`: raise, or hand out what was cut. `include_kept`: samples with `exact_version` may go to engines that
        stay at that version while the fleet moves on (`weightplane engines keep`). `tls`: how the client proves who it
        is (role rollout), by a certificate or a token.
        """
        self._coordinator = coordinator
        self._model = ModelName(model)
        self._wait_seconds = wait_seconds
        self._deadline_seconds = deadline_seconds
        self._on_loss = on_loss
        self._connections = Connections(tls)
        run = None if run_id is None else RunId(run_id)
        self._watch = RouteWatch(coordinator, self._model, run, self._connections, include_kept=include_kept, tls=tls)
        self._choosing = Choosing(self._watch, policy or LeastLoaded(), coordinator)
        self._running = Running(self._connections, self._model, self._watch.wake)
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._watcher = asyncio.create_task(self._watch.run(), name=f"watch-routes-{self._model}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        await self._connections.close()

    @property
    def routes(self) -> Routes | None:
        """What the coordinator last said; None before its first word."""
        return self._watch.table.routes

    @property
    def commits(self) -> Commits:
        """The fleet's commits, as far as they were told: what lag is counted in. Grows while the client lives."""
        return self._watch.table.commits

    async def changed(self, timeout: float) -> bool:
        """Whether the routes, or what is known of the fleet's commits, changed within `timeout` seconds."""
        return await self._watch.change(timeout)

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingSettings,
        *,
        min_version: WeightVersion | None = None,
        exact_version: WeightVersion | None = None,
        max_lag: int | None = None,
        session_id: str = "",
        request_id: str = "",
        deadline_seconds: float | None = None,
        on_loss: OnLoss | None = None,
        prefix: Sample | None = None,
    ) -> Sample:
        """A whole sample, begun with a version that the pins allow.

        Args:
            min_version: This one or a later one.
            exact_version: This one, for the whole sample; an install ends it as `version_changed`.
            max_lag: At most so many fleet commits behind the newest.
            session_id: Requests of one conversation; the policy `BySession` sends them to one engine.
            prefix: A sample of the same prompt that was cut: it goes on from there, and `sampling.max_tokens` counts
                its tokens too. Its spans are the new one's.

        Raises:
            InvalidRequest, FrameInvalid: the request cannot be served anywhere.
            WrongRun: the coordinator leads another run than `run_id`.
            Unauthenticated, PermissionDenied: what `tls` shows is not known there, or not of a rollout's role.
            DeadlineExceeded: no engine was routable in time, or the sample did not end in time.
            VersionUnavailable, EngineNotReady, EnginePoisoned, EngineDied, LimitExceeded: the last engine's answer,
                after every engine was tried until `wait_seconds` had passed.
            PeerLost: the engine went away in mid-sample.
            SpanMismatch: the engine's spans do not cover the tokens exactly.
        """
        pin = Pin(min_version, exact_version, max_lag)
        ask = self._new_ask(prompt_token_ids, sampling, pin, request_id, deadline_seconds, session_id, on_loss, prefix)
        async with contextlib.aclosing(self._deltas(ask)) as deltas:
            async for _ in deltas:
                pass  # the assembly has taken it
        return ask.assembly.finish()

    async def stream(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingSettings,
        *,
        min_version: WeightVersion | None = None,
        exact_version: WeightVersion | None = None,
        max_lag: int | None = None,
        session_id: str = "",
        request_id: str = "",
        deadline_seconds: float | None = None,
        on_loss: OnLoss | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """The deltas of a sample as they come; the last has `ending`. Raises as `generate` does.

        What was handed out cannot be taken back: `restart` is refused. Closing the generator (`contextlib.aclosing`)
        aborts the request in the engine.
        """
        if (on_loss or self._on_loss) == "restart":
            raise e.InvalidRequest(field="on_loss", problem="a stream cannot be restarted; resume or fail")
        pin = Pin(min_version, exact_version, max_lag)
        ask = self._new_ask(prompt_token_ids, sampling, pin, request_id, deadline_seconds, session_id, on_loss, None)
        async with contextlib.aclosing(self._deltas(ask)) as deltas:
            async for delta in deltas:
                yield delta

    async def generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingSettings,
        *,
        at_once: int = BATCH_AT_ONCE,
        progress: Callable[[int, int], None] | None = None,
        min_version: WeightVersion | None = None,
        max_lag: int | None = None,
        on_loss: OnLoss | None = None,
    ) -> list[list[Sample]]:
        """`sampling.n` samples of each prompt, in the prompts' order. The first error ends all of them.

        `progress` is told how many samples are done, and of how many. Samples of one prompt are one session.
        """
        done, total, room = 0, len(prompts) * sampling.n, asyncio.Semaphore(at_once)

        async def one(prompt: Sequence[int], place: int, index: int) -> Sample:
            nonlocal done
            seed = None if sampling.seed is None else sampling.seed + index
            async with room:
                sample = await self.generate(
                    prompt,
                    replace(sampling, n=1, seed=seed),
                    min_version=min_version,
                    max_lag=max_lag,
                    on_loss=on_loss,
                    session_id=f"batch-{place}",
                )
            done += 1
            if progress is not None:
                progress(done, total)
            return sample

        async with asyncio.TaskGroup() as group:
            tasks = [
                [group.create_task(one(prompt, place, i)) for i in range(sampling.n)]
                for place, prompt in enumerate(prompts)
            ]
        return [[task.result() for task in of_prompt] for of_prompt in tasks]

    async def score(
        self,
        token_ids: Sequence[int],
        *,
        min_version: WeightVersion | None = None,
        exact_version: WeightVersion | None = None,
        max_lag: int | None = None,
        session_id: str = "",
        deadline_seconds: float | None = None,
    ) -> Scores:
        """How probable each of the tokens is, all to one version. Asked again where an install came between.

        Raises as `generate` does; ScoreIncomplete: the engine left one out.
        """
        pin, one = Pin(min_version, exact_version, max_lag), SamplingSettings(max_tokens=1)
        ask = self._new_ask(token_ids, one, pin, "", deadline_seconds, session_id, "fail", None)
        while True:
            chosen = await self._choosing.next_route(ask)
            assert chosen is not None, "scores are not aborted"
            route, run_id = chosen
            request = rollout_pb2.ScoreRequest(
                run_id=run_id,
                model=self._model,
                request_id=ask.assembly.request_id,
                token_ids=token_ids,
                pin=pin_to_proto(pin),
                wait=seconds_to_proto(ask.engine_wait),
            )
            validate(request)
            try:
                with self._watch.asking(route):
                    answer = await self._connections.rollout(route.endpoint).Score(request, timeout=ask.time_left)
            except grpc.aio.AioRpcError as error:
                self._declined(engine_error(error, route, ask), route, ask)
                continue
            return Scores((None, *answer.logprobs), version_from_proto(answer.version), route.engine_id)

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        """End requests of this client, or all of them, wherever they are.

        Their samples come back as they are, with finish_reason `abort`; those without a token too. Idempotent.
        """
        await self._running.abort(request_ids)

    # ---- one request ----------------------------------------------------------------------------

    def _new_ask(
        self,
        prompt: Sequence[int],
        sampling: SamplingSettings,
        pin: Pin,
        request_id: str,
        deadline_seconds: float | None,
        session_id: str,
        on_loss: OnLoss | None,
        prefix: Sample | None,
    ) -> Ask:
        if sampling.n != 1:
            raise e.InvalidRequest(field="sampling.n", problem="one sample at a time; generate_batch makes several")
        recovery = on_loss or self._on_loss
        check_recovery(sampling, recovery, prefix)
        now = time.monotonic()
        limit = self._deadline_seconds if deadline_seconds is None else deadline_seconds
        patience = min(limit, self._wait_seconds)
        assembly = Assembly(request_id or uuid.uuid4().hex, pin, with_logprobs=sampling.logprobs is not None)
        return Ask(
            model=self._model,
            pin=pin,
            prompt=tuple(prompt),
            sampling=sampling,
            assembly=prefixed(assembly, prefix),
            prefix=prefix,
            session_id=session_id,
            on_loss=recovery,
            started=now,
            deadline=now + limit,
            patience=now + patience,
            patience_seconds=patience,
        )

    async def _deltas(self, ask: Ask) -> AsyncGenerator[Delta, None]:
        with self._running.request(ask):
            while (chosen := await self._choosing.next_route(ask)) is not None:
                route, run_id = chosen
                try:
                    async with contextlib.aclosing(self._ask_engine(route, run_id, ask)) as deltas:
                        async for delta in deltas:
                            ask.assembly.add(delta)
                            if ask.cut(delta):
                                yield replace(delta, ending=None)
                                raise e.RequestAborted(request_id=ask.assembly.request_id)
                            yield delta
                    return
                except ELSEWHERE_MAY_DO as error:
                    rest = self._declined(error, route, ask)
                    if rest is not None:
                        ask.assembly.add(rest)
                        yield rest
                        return
            rest = ask.ended_by_caller()
            ask.assembly.add(rest)
            yield rest

    def _declined(self, error: e.WeightplaneError, route: Route, ask: Ask) -> Delta | None:
        """Raises the error where no other engine may be asked; a delta where the sample is whole as it is."""
        if not isinstance(error, ELSEWHERE_MAY_DO):
            raise error
        rest = ask.lost(error)
        log.info(
            "engine_declined",
            engine=route.engine_id,
            reason=error.reason,
            text=str(error),
            request=ask.assembly.request_id,
        )
        if not isinstance(error, (e.RequestAborted, e.VersionChanged)):
            ask.tried.add((route.engine_id, route.incarnation))
        return rest

    async def _ask_engine(self, route: Route, run_id: RunId, ask: Ask) -> AsyncGenerator[Delta, None]:
        """One attempt on one engine. Ends after a delta with `ending`, or raises."""
        request = ask.request()
        request.run_id = run_id
        request.wait.CopyFrom(seconds_to_proto(ask.engine_wait))
        validate(request)
        with self._watch.asking(route), self._running.at(route, run_id, ask):
            stub = self._connections.rollout(route.endpoint)
            call = stub.Generate(request, timeout=ask.time_left, metadata=caller_metadata())
            try:
                async for response in call:
                    delta = delta_from_proto(route.engine_id, response)
                    _refuse_empty_end(delta, ask)
                    yield delta
                    if delta.ending is not None:
                        return
            except grpc.aio.AioRpcError as error:
                raise engine_error(error, route, ask) from error
            finally:
                call.cancel()
        raise e.PeerLost(peer=route.engine_id, cause="the stream ended without a finish")


def _refuse_empty_end(delta: Delta, ask: Ask) -> None:
    """An engine that ends a sample before its first token has lost nothing of it: another one may do it."""
    if delta.ending is None or delta.tokens or ask.has_begun or ask.aborted:
        return
    error = nothing_came(delta.engine_id, ask.assembly.request_id, delta.ending.finish_reason, delta.ending.stop_reason)
    if error is not None:
        raise error
