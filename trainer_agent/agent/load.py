"""What a trainer will send, in the few numbers that a plan is judged by. From declared shapes alone (M5)."""

from __future__ import annotations

from controlplane.core.layout import Layout
from trainer_agent.source import layerwise_groups
from weightplane.v1 import fleet_pb2


def load_of(layout: Layout, chunk_bytes: int) -> fleet_pb2.Load:
    """`chunk_bytes`: the largest chunk that its ranks make."""
    sizes = {t.name: t.byte_count for t in layout.tensors}
    modules = [sum(sizes[name] for name in group) for group in layerwise_groups(list(sizes))]
    return fleet_pb2.Load(
        tensor_count=len(sizes),
        byte_count=layout.byte_count,
        chunk_bytes=chunk_bytes,
        largest_module_bytes=max(modules, default=0),
        format=layout.format,
    )
