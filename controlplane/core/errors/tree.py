"""The root of the tree, its two branches, and how an error is shown and told."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from controlplane.core.errors.shown import some

PUBLIC = "controlplane.core.errors"
"""Where the tree is found, and what its classes say of themselves: the files are nobody's business."""


@dataclass(eq=False)
class WeightplaneError(Exception):
    """The root. Subclasses set `reason` and `template`; their fields fill the template."""

    reason: ClassVar[str] = ""
    template: ClassVar[str] = ""

    def __post_init__(self) -> None:
        super().__init__(str(self))

    def __str__(self) -> str:
        return self.template.format(**{f.name: _shown(getattr(self, f.name)) for f in dataclasses.fields(self)})

    def metadata(self) -> dict[str, str]:
        """The attributes as text, for ErrorInfo. Long lists are cut, with a count beside them."""
        out: dict[str, str] = {}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            out[f.name] = _shown(value)
            if isinstance(value, list):
                out[f"{f.name}_count"] = str(len(value))
        return out


class Refused(WeightplaneError):
    """Refused before anything was touched."""


class Failed(WeightplaneError):
    """Tried, and did not work."""


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return some(value)
    return some(sorted(value)) if isinstance(value, (frozenset, set)) else str(value)
