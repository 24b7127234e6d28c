"""Reflection that reads as documentation: `grpcurl describe` shows the comments of the protos.

Generated Python drops comments, and so does protobuf's own descriptor pool. So our files in the answers of the standard
reflection service get theirs back, from `weightplane/v1/documented.binpb`, which `make protos` makes. Nothing else of
an answer is changed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from functools import cache
from importlib.resources import files
from typing import Any

import grpc
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha._async import ReflectionServicer

DOCUMENTED_FILE = "documented.binpb"


def enable_documented_reflection(service_names: Iterable[str], server: grpc.aio.Server) -> None:
    """Serve reflection of these services, comments included."""
    add: Any = reflection_pb2_grpc.add_ServerReflectionServicer_to_server
    add(_Documented(tuple(service_names)), server)


class _Documented:
    """The standard servicer, its answers changed on their way out."""

    def __init__(self, service_names: tuple[str, ...]) -> None:
        self._standard: Any = ReflectionServicer(service_names)

    async def ServerReflectionInfo(
        self, request_iterator: AsyncIterator[reflection_pb2.ServerReflectionRequest], context: Any
    ) -> AsyncIterator[reflection_pb2.ServerReflectionResponse]:
        async for response in self._standard.ServerReflectionInfo(request_iterator, context):
            yield _with_comments(response)


def _with_comments(response: reflection_pb2.ServerReflectionResponse) -> reflection_pb2.ServerReflectionResponse:
    if response.HasField("file_descriptor_response"):
        kept = list(response.file_descriptor_response.file_descriptor_proto)
        response.file_descriptor_response.file_descriptor_proto[:] = [_documented(file) for file in kept]
    return response


def _documented(file: bytes) -> bytes:
    described = descriptor_pb2.FileDescriptorProto.FromString(file)
    comments = _comments().get(described.name)
    if comments is None:
        return file
    described.source_code_info.CopyFrom(comments)
    return described.SerializeToString()


@cache
def _comments() -> dict[str, descriptor_pb2.SourceCodeInfo]:
    """By file. They name their places by index, and the generated code has the same ones in the same order."""
    content = files("weightplane.v1").joinpath(DOCUMENTED_FILE).read_bytes()
    made = descriptor_pb2.FileDescriptorSet.FromString(content)
    return {file.name: file.source_code_info for file in made.file}
