"""weightplane.v1.WeightUpdate: frames in, events to the core, answers out.

The stream carries an attempt up to its commit frame; then the agent's install goes on without it. An end of the
stream, a broken connection and silence are the same thing here: an abort, unless the commit frame came (INV-3).
With the checkpoint transport the writer sends no bytes: the agent reads them, while it goes on listening.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from controlplane.core import errors as e
from controlplane.rpc.bulk import decoded
from engine_agent.life.engine_life import EngineLifeHolder
from engine_agent.receivers import DEFAULT_TRANSPORTS, transports_of
from engine_agent.services.update_attempt import Response, Rules, UpdateAttempt
from engine_agent.services.update_reader import FrameReader, Frames
from weightplane.v1 import weight_update_pb2, weight_update_pb2_grpc


def add_weight_update(servicer: WeightUpdateService, server: grpc.aio.Server) -> None:
    """As the generated function of that kind, with chunk frames that leave their bytes where they came."""
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.UpdateWeights, request_deserializer=decoded, response_serializer=Response.SerializeToString
    )
    service = weight_update_pb2.DESCRIPTOR.services_by_name["WeightUpdate"]
    name = service.methods_by_name["UpdateWeights"].name
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, {name: handler}),))


class WeightUpdateService(weight_update_pb2_grpc.WeightUpdateServicer):
    """Serves whichever life the engine has now."""

    def __init__(
        self,
        holder: EngineLifeHolder,
        stream_idle_seconds: float,
        checkpoint_root: Path | None = None,
        transports: frozenset[weight_update_pb2.Transport.ValueType] = transports_of(DEFAULT_TRANSPORTS),
    ) -> None:
        """Without a `checkpoint_root` updates from checkpoints are refused, as are other `transports` than these."""
        self._holder = holder
        self._idle_seconds = stream_idle_seconds
        self._rules = Rules(checkpoint_root, transports)

    async def UpdateWeights(self, request_iterator: Frames, context: Any) -> AsyncIterator[Response]:
        life = self._holder.life
        stream, ended = life.streams.begin()
        reader = FrameReader(request_iterator, ended, self._idle_seconds)
        attempt = UpdateAttempt(life, stream, reader, self._rules)
        cause, reason = "the stream ended without a commit", "UPDATE_ABORTED"
        try:
            async for response in attempt.run():
                yield response
        except e.UpdateAborted as error:
            if ended.done():  # the one that noticed first knows less than the event that ended the stream
                raise ended.result() from error
            # Those who noticed may not know which update it was.
            cause = error.cause
            raise e.UpdateAborted(update_id=error.update_id or attempt.update_id, cause=cause) from error
        except e.WeightplaneError as error:
            cause, reason = str(error), error.reason
            raise
        finally:
            reader.close()
            attempt.leave_link()
            attempt.trace(reason, cause)
            life.streams.over(stream, cause, reason)
