"""How a server is reached that the agent did not start. Pure values."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from controlplane.core.names import device_uuid


@dataclass(frozen=True)
class ExternalSettings:
    """Settings of one external engine. Times are in seconds."""

    url: str
    """Of the server, such as http://127.0.0.1:8000; a loopback address, unless `beyond_loopback` is set."""
    model: Path
    """Directory of the model that it loaded. Its safetensors headers say what an update must cover."""
    served: str = ""
    """What the server was started with for a model, if that is not this directory's path."""
    transfer: Literal["weightplane", "ipc"] = "weightplane"
    """The server's weight transfer engine. weightplane: ours, takes whatever the agent received. ipc: vLLM's own, takes
    handles of device memory, which go to it as a pickle and over loopback only."""
    beyond_loopback: bool = False
    """Reach a server by another address. Nothing protects these routes: who reaches them can write its weights. Staged
    bytes are mapped, so it must be this host all the same."""
    device_uuids: tuple[str, ...] = ()
    """One per worker, in rank order. Empty: asked of the workers on a GPU, made from the engine's id on a CPU."""
    start_timeout_seconds: float = 600.0
    """Until the server answers, at most."""
    call_timeout_seconds: float = 60.0
    """One round trip, and the hand-over of tokens when generation stops."""
    install_timeout_seconds: float = 120.0
    """A whole install. Past it the outcome is unknown, and this engine is another incarnation (INV-4)."""
    canary_timeout_seconds: float = 60.0
    shutdown_timeout_seconds: float = 5.0
    """For the last word to a server that stays: that it pauses."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
            raise ValueError(f"url: {self.url!r} is not http://HOST:PORT")
        if not self.loopback and not self.beyond_loopback:
            raise ValueError(f"url: {parts.hostname} is not loopback; beyond_loopback = true takes it all the same")
        if not self.loopback and self.transfer == "ipc":
            raise ValueError("transfer = ipc: pickled handles go over loopback only")
        if len(set(map(device_uuid, self.device_uuids))) != len(self.device_uuids):
            raise ValueError("device_uuids must name different devices")

    @property
    def loopback(self) -> bool:
        host = urlsplit(self.url).hostname or ""
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"
