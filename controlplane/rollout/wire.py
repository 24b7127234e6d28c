"""Between the messages of Fleet.WatchRoutes and Rollout.Generate and this package's values. No gRPC."""

from __future__ import annotations

from controlplane.core.versions import EngineId, Incarnation, RunId
from controlplane.rollout.routing import Route, Routes
from controlplane.rollout.sample import Delta, Ending
from controlplane.rpc.codec import commit_from_proto, routed_from_proto, version_from_proto
from controlplane.rpc.sample_codec import finish_reason_from_proto, span_from_proto
from weightplane.v1 import fleet_pb2, rollout_pb2


def routes_from_proto(response: fleet_pb2.WatchRoutesResponse) -> Routes:
    return Routes(
        run_id=RunId(response.run_id),
        revision=response.revision,
        routes=tuple(_route(r) for r in response.routes),
        served=tuple(version_from_proto(v) for v in response.served),
        commits=tuple(commit_from_proto(c) for c in response.commits),
    )


def _route(message: fleet_pb2.Route) -> Route:
    return Route(
        engine_id=EngineId(message.engine.engine_id),
        incarnation=Incarnation(message.engine.incarnation),
        endpoint=message.endpoint,
        applied=version_from_proto(message.applied) if message.HasField("applied") else None,
        live_requests=message.live_requests,
        max_requests=message.max_requests,
        kept=message.kept,
    )


def delta_from_proto(engine_id: EngineId, response: rollout_pb2.GenerateResponse) -> Delta:
    return Delta(
        engine_id=engine_id,
        tokens=tuple(response.token_ids),
        logprobs=tuple(response.logprobs),
        version=version_from_proto(response.version) if response.HasField("version") else None,
        ending=_ending(response.finish) if response.HasField("finish") else None,
        sampling_masks=tuple(tuple(mask.token_ids) for mask in response.sampling_masks),
        routed_experts=routed_from_proto(response.routed_experts) if response.HasField("routed_experts") else None,
    )


def _ending(finish: rollout_pb2.Finish) -> Ending:
    return Ending(
        finish_reason=finish_reason_from_proto(finish.reason),
        stop_reason=finish.stop_reason,
        spans=tuple(span_from_proto(s) for s in finish.spans),
        prompt_tokens=finish.prompt_tokens,
        cached_prompt_tokens=finish.cached_prompt_tokens,
    )
