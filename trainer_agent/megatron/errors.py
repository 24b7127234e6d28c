"""What goes wrong between a Megatron model and its checkpoint names."""

from __future__ import annotations

from dataclasses import dataclass, field

from controlplane.core.errors import LayoutInvalid


@dataclass(eq=False)
class UnsupportedModel(LayoutInvalid):
    """The model, or its config, asks for something that its family's mapping does not cover.

    A kind of LAYOUT_INVALID: that is what other ranks and the coordinator see.
    """

    template = "{problem}"
    problem: str
    names: list[str] = field(default_factory=list)


class GatherFailed(RuntimeError):
    """A peer did not take its part in a collective. The process groups can't be used any more.

    Not in the tree: a PEER_LOST that a rank reports is repeated, and a repetition would go over the same groups. Any
    exception that is none of the tree's is the end of the rank that raises it, which this is.
    """
