"""The words of the protos' enums, as people read them: `applied` of UPDATE_STAGE_APPLIED."""

from __future__ import annotations

import re
from functools import cache
from typing import Any


def word_of(enum: Any, value: int) -> str:
    """`enum` as its module has it, such as `engine_pb2.UpdateStage`. Raises ValueError: it has no such value."""
    name: str = enum.Name(value)
    return name.removeprefix(_prefix(enum.DESCRIPTOR.name)).lower()


@cache
def _prefix(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper() + "_"
