"""The words of the protos' enums, as people read them: `applied` of UPDATE_STAGE_APPLIED."""

from __future__ import annotations

import re
from functools import cache

from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper


def word_of(enum: EnumTypeWrapper, value: int) -> str:
    """Raises ValueError: the enum has no such value."""
    return enum.Name(value).removeprefix(_prefix(enum.DESCRIPTOR.name)).lower()


@cache
def _prefix(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper() + "_"
