"""How an engine agent runs: its own settings, and the tables of what is beside it. Refuses what cannot work."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from controlplane.core.pauses import KEEP, PausePolicy
from controlplane.core.rates import DEFAULT_RATES, RateSettings
from controlplane.rpc.security import PLAIN, TlsSettings, check_listen
from controlplane.tracing import BY_ENVIRONMENT, TracingSettings
from engine_agent.external.settings import ExternalSettings
from engine_agent.memory.model import MemorySettings
from engine_agent.openai_door.settings import OpenAiSettings
from engine_agent.receivers import DEFAULT_TRANSPORTS, TRANSPORTS
from engine_agent.vllm.settings import VllmSettings


@dataclass(frozen=True)
class EngineSettings:
    """How an engine agent runs."""

    engine_id: str
    """Name of the engine, unique in the run, stable over restarts."""
    coordinator: str = "127.0.0.1:7070"
    """Address of the coordinator."""
    run_id: str = "default"
    """The run that it belongs to."""
    model: str = "policy"
    """The model that it serves."""
    listen: str = "127.0.0.1:0"
    """Address to serve on; port 0 takes any free one."""
    advertise: str = ""
    """Address that others reach it by, if it is not the one it listens on."""
    state_dir: Path = Path("weightplane-state")
    """Directory for what must survive the agent: `<engine_id>.json`, `<engine_id>.number.json`."""
    backend: str = "vllm"
    """vllm; external: a vLLM server that somebody else started; or memory: an engine without a model, for tests."""
    vllm: VllmSettings | None = None
    """Settings of the vLLM engine."""
    external: ExternalSettings | None = None
    """How the external server is reached."""
    memory: MemorySettings = field(default_factory=MemorySettings)
    """Settings of the in-memory engine."""
    cpu_devices: tuple[int, ...] = ()
    """On a host without GPUs: numbers of the "devices" of its workers; trainer ranks of equal numbers are colocated."""
    stream_idle_seconds: float = 60.0
    """An update's stream without a frame for so long is aborted."""
    stop_drain_seconds: float = 20.0
    """At SIGTERM: how long requests in the engine may go on, while no others enter. A second signal ends it at once."""
    max_restarts: int = 5
    """Deaths in a row after which it starts its engine again; then it ends. 10 minutes of life begin the count anew."""
    transports: tuple[str, ...] = DEFAULT_TRANSPORTS
    """How trainers may bring it bytes: shared_memory, inline, broadcast, cuda_ipc (where its workers have GPUs, with
    `apply = "streaming"`). inline is always among them."""
    checkpoint_root: Path | None = None
    """Directory of checkpoints that it may be brought up to date from; without one such updates are refused."""
    deltas: bool = False
    """Keep the bytes of what the engine holds, and take updates that change only some of them. Costs host memory of one
    copy of the weights, and of a second one during an update; with shared memory it brings nothing."""
    keep_staging: bool | None = None
    """Keep the memory into which versions come from other hosts (host memory, as large as the weights) from one update
    to the next: making it anew takes longer than writing to it. False: it is there while an update is. Unset: it is
    kept where four times as much is available beside it."""
    apply: Literal["staged", "streaming"] = "staged"
    """staged: the engine generates until a version is here, whole and checked. streaming: what comes by shared memory,
    inline or by device memory is installed chunk by chunk, and needs no second copy of the weights here; generation
    stands still for the whole transfer, and a stream that fails leaves the engine shut until the next push."""
    pause: PausePolicy = KEEP
    """What becomes of the requests in the engine at an install, unless the trainer says it: `mode` keep, abort or wait;
    with wait `wait_seconds` and a `fallback`."""
    initial: Literal["unset", "serve"] = "unset"
    """unset: what the engine loads at its start is served to nobody. serve: it is served as number 0, and never
    updated: the engine of a frozen model (teacher, reference)."""
    openai: OpenAiSettings | None = None
    """Serve vLLM's OpenAI-compatible API too, behind the gate. Absent: no."""
    metrics_listen: str = ""
    """Address that answers GET /metrics; empty: none does."""
    group: str = ""
    """What the coordinator's min_engines counts it under."""
    unit: str = ""
    """Engines of one unit serve together or not at all, such as prefill and decode. Empty: it is alone."""
    unit_size: int = 0
    """How many engines its unit has."""

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
        if self.pause.problem_at_an_install:
            raise ValueError(f"pause: {self.pause.problem_at_an_install}")
        if self.unit_size < 0 or bool(self.unit) != bool(self.unit_size):
            raise ValueError("unit and unit_size go together: name the unit, and how many engines it has")
        if unknown := set(self.transports) - set(TRANSPORTS):
            raise ValueError(f"no transports: {sorted(unknown)}; there are {', '.join(TRANSPORTS)}")
        if "inline" not in self.transports:
            raise ValueError("transports: every engine takes inline, the way that is left where no other works")
        if self.openai is not None and self.backend != "vllm":
            raise ValueError("openai: only vLLM has such an API; an in-memory engine has none")
        if self.openai is not None:
            self.openai.check_with(self.tls, self.insecure)
        if self.backend == "external" and self.initial == "serve":
            raise ValueError("initial = serve: what an external server holds is nobody's until an update (INV-1)")
        if self.apply not in ("staged", "streaming"):
            raise ValueError(f"apply: {self.apply!r}; there are staged and streaming")
