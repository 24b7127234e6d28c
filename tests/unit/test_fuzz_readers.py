"""What guided fuzzing sets out from is read to its end, and what is cut off is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import DecodeError

from controlplane.core.errors import FrameInvalid
from tests.fuzz.readers import SERVICES, honest, read, rpcs
from tests.support.every_rpc import Rpc

HONEST = honest()


def rpc_of(service: str, message: Any) -> Rpc:
    return next(rpc for rpc in rpcs(service) if rpc.descriptor.input_type == message.DESCRIPTOR)


@pytest.mark.parametrize(("service", "message"), HONEST, ids=[type(m).__name__ for _, m in HONEST])
def test_an_honest_message_is_read_to_its_end(service: str, message: Any) -> None:
    read(rpc_of(service, message), message.SerializeToString())


def test_each_service_has_an_honest_message() -> None:
    assert {service for service, _ in HONEST} == set(SERVICES)


@pytest.mark.parametrize(("service", "message"), HONEST, ids=[type(m).__name__ for _, m in HONEST])
def test_every_beginning_of_it_is_read_or_refused(service: str, message: Any) -> None:
    data, refused = message.SerializeToString(), 0
    for end in range(len(data)):
        try:
            read(rpc_of(service, message), data[:end])
        except (DecodeError, FrameInvalid):
            refused += 1
    assert refused >= len(data) // 2
