"""What glibc's malloc does with memory that is freed, for processes through which bytes travel in messages of a MiB.

Left to itself it gives such memory back to the kernel and takes it anew with each message, page by page: with inline
updates that is a quarter of all CPU time that they take. Told so once, it keeps up to KEPT_BYTES.
"""

from __future__ import annotations

import ctypes

KEPT_BYTES = 64 << 20
"""Free at the end of the heap before any of it goes back."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MAPPED_FROM_BYTES = 32 << 20
"""glibc's own upper limit: only what is larger is mapped by itself, and unmapped when it is freed."""


def keep_freed_memory() -> bool:
    """Whether this process's allocator has such settings, and took them. Idempotent."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False  # another C library
    return bool(mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM_BYTES) and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))
