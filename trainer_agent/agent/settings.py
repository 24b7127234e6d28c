"""Settings of a trainer agent."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass, field
from pathlib import Path

from controlplane.core.errors import InvalidRequest
from controlplane.core.rates import DEFAULT_RATES, RateSettings
from controlplane.rpc.security import PLAIN, TlsSettings, check_listen
from controlplane.tracing import BY_ENVIRONMENT, TracingSettings
from trainer_agent.chunking import DEFAULT_CHUNK_BYTES

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
MIN_CHUNK_BYTES = 64 * 1024


def default_trainer_id() -> str:
    """`trainer-` and the host's name: stable over restarts."""
    return f"trainer-{socket.gethostname()}"[:128]


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """What a trainer agent is told once, at its start.

    Raises:
        InvalidRequest: a value that cannot work.
    """

    coordinator: str = "127.0.0.1:7070"
    """host:port of the coordinator."""
    run_id: str = ""
    """The run. Empty: the coordinator's."""
    model: str = "policy"
    """The model that the ranks train; a rank that says another is refused. Empty: whatever the ranks say."""
    trainer_id: str = field(default_factory=default_trainer_id)
    """Name of the trainer, stable over restarts."""
    nproc_per_node: int = 1
    """Ranks to start."""
    max_restarts: int = 3
    """How often the set of ranks is started again after a failure. A fenced set never is."""
    state_dir: Path | None = None
    """Where the agent notes whose ranks it started, so that after a crash it can prove them dead and get its lease
    back at once. None: it waits for the lease to lapse."""
    takeover: bool = False
    """Take the lease over whoever holds it; the holder is fenced."""
    listen: str = "127.0.0.1:0"
    """Address to serve Lifecycle on: status, stop, the ranks' last output. Port 0 takes any free one."""
    metrics_listen: str = ""
    """Address that answers GET /metrics; empty: none does."""
    address_file: Path | None = None
    """Where the bound address is written, once it serves."""
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    """Largest range of a segment that is announced at once; where bytes go inline no more than 16 MiB are."""
    link_host: str = ""
    """Address of this host at which engines reach its ranks, for broadcasts to engines on other hosts: each rank that
    sends listens there, on ports that the system chooses. Who reaches it can join in: for networks that are trusted.
    Empty: no broadcasts."""
    checkpoint_root: Path | None = None
    """Directory that the engines' nodes see too: committed versions are kept there, so that the coordinator can bring
    engines up to date and roll back. It is made if it is missing. None: no checkpoints."""
    checkpoint_every: int = 1
    """Keep the first committed push, and then each so many-th. Nobody waits for it; a push that comes while one is
    written has none, and the next one has. Until it is written its ranks hold two copies of the weights in memory."""
    checkpoint_keep: int = 2
    """How many of them stay; older ones of this run and model are retired, then deleted."""
    stop_seconds: float = 30.0
    """How long ranks may take to end after SIGTERM, before they are killed."""

    tracing: TracingSettings = BY_ENVIRONMENT
    """Whether and where it sends OpenTelemetry spans: see docs/tracing.md."""
    tls: TlsSettings = PLAIN
    """How it proves who it is, and who may call it: see docs/security.md."""
    rate: RateSettings = DEFAULT_RATES
    """How often one caller may call what steers or looks; sessions, weights and tokens are not counted."""
    insecure: bool = False
    """Serve other hosts without TLS: for networks that keep strangers out by themselves."""

    def __post_init__(self) -> None:
        check_listen(self.listen, self.tls, self.insecure)
        if not self.coordinator:
            raise InvalidRequest(field="coordinator", problem="is required")
        if _NAME.fullmatch(self.trainer_id) is None:
            raise InvalidRequest(field="trainer_id", problem=f"{self.trainer_id!r} does not match {_NAME.pattern}")
        if self.nproc_per_node < 1:
            raise InvalidRequest(field="nproc_per_node", problem=f"at least 1, not {self.nproc_per_node}")
        if self.max_restarts < 0:
            raise InvalidRequest(field="max_restarts", problem=f"at least 0, not {self.max_restarts}")
        if self.chunk_bytes < MIN_CHUNK_BYTES:
            raise InvalidRequest(field="chunk_bytes", problem=f"at least {MIN_CHUNK_BYTES}, not {self.chunk_bytes}")
        if self.checkpoint_every < 1:
            raise InvalidRequest(field="checkpoint_every", problem=f"at least 1, not {self.checkpoint_every}")
        if self.checkpoint_keep < 1:
            raise InvalidRequest(field="checkpoint_keep", problem=f"at least 1, not {self.checkpoint_keep}")
