"""JSON in a request: how deep and how many, judged before anybody recurses into it."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.json_format import ParseDict

from controlplane.core.errors import FrameInvalid
from controlplane.rpc.validation import MAX_STRUCT_DEPTH, MAX_STRUCT_VALUES, validate
from weightplane.v1 import rollout_pb2


def request(extra: dict[str, Any]) -> rollout_pb2.GenerateRequest:
    made = rollout_pb2.GenerateRequest(run_id="r", model="m", request_id="q", prompt_token_ids=[1])
    made.sampling.max_tokens = 1
    ParseDict(extra, made.sampling.extra)
    return made


def nested(levels: int, wrap: Any) -> dict[str, Any]:
    value: Any = 1
    for _ in range(levels - 1):
        value = wrap(value)
    return {"a": value}


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: {"b": v}])
def test_lists_and_tables_in_one_another_have_a_limit(wrap: Any) -> None:
    validate(request(nested(MAX_STRUCT_DEPTH, wrap)))
    with pytest.raises(FrameInvalid, match=r"sampling\.extra: may be nested at most 8 deep"):
        validate(request(nested(MAX_STRUCT_DEPTH + 1, wrap)))


def test_values_have_a_limit_wherever_they_are() -> None:
    validate(request({"a": [0] * (MAX_STRUCT_VALUES - 1)}))
    for extra in ({"a": [0] * MAX_STRUCT_VALUES}, {str(i): 0 for i in range(MAX_STRUCT_VALUES + 1)}):
        with pytest.raises(FrameInvalid, match="may have at most 10000 values"):
            validate(request(extra))
