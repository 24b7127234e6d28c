"""How the door is run. Pure values: reading them imports neither vLLM nor an HTTP library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from controlplane.rpc.security import TlsSettings, check_listen, http_tls

OWN_ARGUMENTS = frozenset(
    {"model", "served_model_name", "host", "port", "uds", "root_path", "middleware", "lora_modules"}
    | {"disable_log_stats"}
)
"""Arguments of vLLM's server that are the agent's to set."""


@dataclass(frozen=True)
class OpenAiSettings:
    """The door of one engine agent. Times are in seconds, sizes in bytes."""

    listen: str
    """Address of the door, such as 127.0.0.1:8000; port 0 takes any free one, which the log line `door_ready` names."""
    tokens: Path | None = None
    """File of the tokens that the door takes, where the agent's own port asks for certificates: OpenAI's clients show a
    token as their API key. Without it the door asks for what the agent's `tls` asks for."""
    wait_seconds: float = 30.0
    """How long a request waits outside the gate; then it gets 503, with Retry-After and the reason."""
    max_requests: int = 512
    """Requests at once, waiting or running; one more gets 503."""
    max_body_bytes: int = 4 << 20
    """Of one request; a longer one gets 413."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of vLLM's server by their names, such as chat_template, tool_call_parser or api_key (a list)."""
    router: str = ""
    """Address of a vllm-router, such as http://router:30000: it is told of this door while the gate is open."""
    advertise: str = ""
    """URL that the router reaches the door by, if it is not http:// and the address that it listens on."""

    def __post_init__(self) -> None:
        taken = OWN_ARGUMENTS & self.arguments.keys()
        if taken:
            raise ValueError(f"openai.arguments may not set {', '.join(sorted(taken))}")
        host, _, port = self.listen.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"openai.listen: {self.listen!r} is not HOST:PORT")
        if min(self.wait_seconds, self.max_requests, self.max_body_bytes) <= 0:
            raise ValueError("openai: wait_seconds, max_requests and max_body_bytes are above 0")

    def check_with(self, tls: TlsSettings, insecure: bool) -> None:
        """Beside the agent's own. Raises ValueError: everybody on the network would be let in, or a key asked twice."""
        asks = http_tls(tls, self.tokens)
        check_listen(self.listen, asks, insecure, "openai.listen")
        if asks.secured and "api_key" in self.arguments:
            raise ValueError("openai.arguments.api_key: the door asks for tokens or certificates itself; leave it out")
