"""Whether a tensor's bytes are there to be read: offloading takes the memory away and leaves shape and dtype."""

from __future__ import annotations

import torch


def has_storage(tensor: torch.Tensor) -> bool:
    """False for tensors on the meta device, and for those whose storage was resized to nothing."""
    if tensor.numel() == 0:
        return True
    return not tensor.is_meta and tensor.untyped_storage().nbytes() > 0
