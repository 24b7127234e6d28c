"""Names as people and drivers write them, and the one form and order that they are compared in.

Device UUIDs come from drivers, frameworks and settings, which write the same device in several ways; slots are matched
by text (G9), so every border turns them into one form. Ids are ordered as numbers where they are numbers: `e2` comes
before `e10`.
"""

from __future__ import annotations

import re
from functools import lru_cache

from controlplane.core.versions import DeviceUuid, TrainerId

_UUID = re.compile(
    r"(?P<kind>(?:GPU|MIG(?:-GPU)?)-)?(?P<hex>[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})(?P<instance>/\d+/\d+)?",
    re.IGNORECASE | re.ASCII,
)
"""As NVIDIA's drivers print them (old ones a MIG instance as `MIG-GPU-…/1/0`), and as torch does, without a prefix."""
_NUMBER = re.compile(r"([0-9]+)")

MAX_OWNER_LENGTH = 128
"""Of a hold's owner, in the contract."""
TRAINERS = "trainer:"
"""How the owners of holds begin that are trainers."""

NAMES_KEPT = 1 << 16
"""Names whose order is remembered: a view sorts all engines' names several times a second."""

NaturalKey = tuple[tuple[str | int, ...], str]


def device_uuid(text: str) -> DeviceUuid:
    """One form for one device: no spaces around it, the prefix GPU- or MIG- there and upper case, hex digits lower
    case. Names of another shape, such as those of CPU "devices", stay as they are."""
    text = text.strip()
    found = _UUID.fullmatch(text)
    if found is None:
        return DeviceUuid(text)
    kind = (found["kind"] or "GPU-").upper()
    return DeviceUuid(f"{kind}{found['hex'].lower()}{found['instance'] or ''}")


def trainer_owner(trainer_id: TrainerId | str) -> str:
    """Whose hold it is where an engine sleeps for a trainer: the same over the trainer's lives."""
    return f"{TRAINERS}{trainer_id}"[:MAX_OWNER_LENGTH]


@lru_cache(NAMES_KEPT)
def natural_key(name: str) -> NaturalKey:
    """For sorting: runs of digits count as numbers. Total: different names have different keys."""
    parts = _NUMBER.split(name)
    return tuple(int(part) if i % 2 else part for i, part in enumerate(parts)), name
