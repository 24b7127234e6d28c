"""How vLLM ended a request, in the words of the engine's port: in this process, or behind a server."""

from __future__ import annotations

_OTHERS = {"repetition": "stop", "error": "abort"}
"""vLLM's reasons that the port does not have; the original stays as the stop reason."""


def ending(reason: str | None, stop: object) -> tuple[str | None, str]:
    """Finish reason and stop reason. `stop`: the string or token that vLLM says it stopped at, or None."""
    if reason is None:
        return None, ""
    found = str(stop) if stop is not None else reason if reason in _OTHERS else ""
    return _OTHERS.get(reason, reason), found
