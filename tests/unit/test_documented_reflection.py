"""Reflection answers with the protos' comments, so that `grpcurl describe` reads as documentation."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from controlplane.rpc.channels import open_channel
from controlplane.rpc.documented import enable_documented_reflection
from weightplane.v1 import weight_update_pb2

SERVICE = weight_update_pb2.DESCRIPTOR.services_by_name["WeightUpdate"].full_name


@pytest.fixture
async def stub() -> AsyncIterator[Any]:
    server = grpc.aio.server()
    enable_documented_reflection([SERVICE], server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        make: Any = reflection_pb2_grpc.ServerReflectionStub
        yield make(channel)
    await server.stop(0)


async def ask(stub: Any, **request: Any) -> reflection_pb2.ServerReflectionResponse:
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(**request)]))
    answer: reflection_pb2.ServerReflectionResponse = await anext(aiter(call))
    return answer


async def files_of(stub: Any, symbol: str) -> dict[str, descriptor_pb2.FileDescriptorProto]:
    answer = await ask(stub, file_containing_symbol=symbol)
    parsed = map(descriptor_pb2.FileDescriptorProto.FromString, answer.file_descriptor_response.file_descriptor_proto)
    return {file.name: file for file in parsed}


async def test_a_services_file_comes_with_its_comments(stub: Any) -> None:
    file = (await files_of(stub, SERVICE))["weightplane/v1/weight_update.proto"]
    comments = [location.leading_comments for location in file.source_code_info.location]
    assert any("Only a `commit` frame commits (INV-3)" in c for c in comments)


async def test_every_file_of_the_contract_has_comments_and_the_messages_of_the_generated_code(stub: Any) -> None:
    files = {n: f for n, f in (await files_of(stub, SERVICE)).items() if n.startswith("weightplane/")}
    assert len(files) > 1
    for name, file in files.items():
        assert file.source_code_info.location, f"{name} has no comments: run `make protos`"
        generated = descriptor_pool.Default().FindFileByName(name)
        assert [m.name for m in file.message_type] == list(generated.message_types_by_name)
        assert [s.name for s in file.service] == list(generated.services_by_name)


async def test_files_that_are_not_ours_come_as_they_are(stub: Any) -> None:
    assert "google/protobuf/duration.proto" in await files_of(stub, SERVICE)


async def test_services_are_listed_and_unknown_symbols_refused(stub: Any) -> None:
    listed = await ask(stub, list_services="")
    assert [s.name for s in listed.list_services_response.service] == [SERVICE]
    unknown = await ask(stub, file_containing_symbol="weightplane.v1.Nothing")
    assert unknown.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
