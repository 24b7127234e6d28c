"""The coordinator process: ledger, core, services, until a signal.

Order of a start: the ledger gives this life's term, durably; then the port is bound; then agents come. Order
of an end: not serving any more, streams end, the ledger closes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import grpc
import structlog

from controlplane.config import ConfigError
from controlplane.coordinator.carrier import Carrier
from controlplane.coordinator.hub import Hub
from controlplane.coordinator.metrics import FleetMetrics
from controlplane.coordinator.rollout_proxy import MAX_CALLS, RolloutProxy
from controlplane.coordinator.services import FleetService, OperatorService
from controlplane.core.errors import InvalidRequest, LedgerError
from controlplane.core.fleet import FleetCore, FleetSettings
from controlplane.core.plan import LinkFate, Transport
from controlplane.core.rates import DEFAULT_RATES, RateSettings
from controlplane.core.update_policy import Mode, UpdatePolicy
from controlplane.core.versions import RunId
from controlplane.exit_codes import ExitCode
from controlplane.ledger import SqliteLedger
from controlplane.rpc.channelz import add_channelz, check_installed
from controlplane.rpc.metrics import serve_metrics, watch_loop
from controlplane.rpc.security import PLAIN, HttpGuard, ServerSecurity, TlsSettings, check_listen, http_tls
from controlplane.rpc.server import RunningServer, start_server, wait_for_signal
from controlplane.supervision import Supervisor
from controlplane.tracing import BY_ENVIRONMENT, TracingSettings, sending_spans
from controlplane.web import serve_page
from controlplane.whole_files import write_whole
from weightplane.v1 import fleet_pb2, fleet_pb2_grpc, operator_pb2, operator_pb2_grpc, rollout_pb2, rollout_pb2_grpc

log = structlog.get_logger(__name__)

READS = ("weightplane.v1.Operator",)
"""Services that answer while the coordinator recovers."""
TICKS_PER_TTL = 10
"""How finely silence is noticed."""


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """How a coordinator runs."""

    listen: str = "127.0.0.1:7070"
    """Address to serve on; port 0 takes any free one, which the log line `coordinator_ready` names."""
    state_dir: Path = Path("weightplane-state")
    """Directory of the ledger."""
    run_id: str = "default"
    """The run that agents and clients must name."""
    heartbeat_seconds: float = 1.0
    """How often agents send their state when nothing changes."""
    lease_ttl_seconds: float = 10.0
    """Silence after which an agent is UNKNOWN and a trainer's lease may be taken over."""
    step_limit_seconds: float = 3600.0
    """A lease is renewed only while the trainer's step or phase moves within this time."""
    ready_limit_seconds: float = 300.0
    """Longest time from an update's begin to go."""
    go_limit_seconds: float = 120.0
    """Longest time from go to the last required outcome."""
    update_mode: str = "barrier"
    """barrier: a version is served when the update is decided. rolling: from the first engine that applied it."""
    update_quorum: int = 0
    """How many of the required engines (units) must be ready and apply; 0: all."""
    min_engines: tuple[str, ...] = ()
    """group=number: so many engines of that group must be ready and apply, whatever the quorum says."""
    max_catch_ups: int = 4
    """Engines brought up to date from checkpoints at once."""
    canary_tolerance: float = 0.05
    """Largest difference between the log probabilities that equal engines give of one prompt under the same bytes; of
    three or more, those that differ by more from most of them are poisoned."""
    transport: Literal["auto", "shared_memory", "inline", "broadcast", "cuda_ipc"] = "auto"
    """How bytes reach engines, where it is possible; where it is not, and with auto, the plan chooses."""
    link_fate: Literal["shared", "per_engine"] = "shared"
    """Of broadcasts. shared: one link for all engines of a sender; the bytes leave it once, and who fails ends them for
    all. per_engine: a link for each."""
    max_rollout_calls: int = MAX_CALLS
    """Rollout calls that it passes on to engines at once, for grpcurl and simple clients; one more is refused."""
    metrics_listen: str = ""
    """Address that answers GET /metrics; empty: none does."""
    web_listen: str = ""
    """Address of the page, such as 127.0.0.1:7080; empty: there is none. It is for viewers, and asks for what `tls`
    asks for; where that asks nobody, it is on loopback, or `insecure` is set."""
    web_tokens: Path | None = None
    """File of the tokens that the page takes, where other ports ask for certificates, which browsers seldom have."""
    channelz: bool = False
    """Serve grpc.channelz.v1 too: which connections and streams there are. Needs the extra `channelz`."""
    address_file: Path | None = None
    """Written with the bound address once it serves; for launchers that passed port 0."""
    web_address_file: Path | None = None
    """The same of the page, as a URL; it is there before `address_file` is."""

    tracing: TracingSettings = BY_ENVIRONMENT
    """Whether and where it sends OpenTelemetry spans: see docs/tracing.md."""
    tls: TlsSettings = PLAIN
    """How it proves who it is, and who may call it: see docs/security.md."""
    rate: RateSettings = DEFAULT_RATES
    """How often one caller may call what steers or looks; sessions, weights and tokens are not counted."""
    insecure: bool = False
    """Serve other hosts without TLS: for networks that keep strangers out by themselves."""

    def __post_init__(self) -> None:
        parse_min_engines(self.min_engines)
        if self.max_rollout_calls < 0:
            raise InvalidRequest("max_rollout_calls", "is at least 0")
        if self.channelz:
            check_installed()
        if self.web_listen:
            check_listen(self.web_listen, http_tls(self.tls, self.web_tokens), self.insecure, "web_listen")
        check_listen(self.listen, self.tls, self.insecure)
        if self.metrics_listen:
            check_listen(self.metrics_listen, replace(self.tls, tokens=None), self.insecure)


async def run_coordinator(settings: CoordinatorSettings, stop: asyncio.Event | None = None) -> int:
    """Serve until SIGINT, SIGTERM or `stop`. Returns the exit code."""
    async with sending_spans(settings.tracing, "coordinator", settings.run_id, settings.run_id):
        return await _run(settings, stop or asyncio.Event())


async def _run(settings: CoordinatorSettings, stop: asyncio.Event) -> int:
    """Start everything, serve, and close what was started, the last first."""
    async with AsyncExitStack() as started:
        try:
            hub, server = await _start(settings, started)
        except LedgerError as error:
            log.error("ledger_failed", cause=str(error))
            return ExitCode.LEDGER
        except ConfigError as error:
            log.error("config_refused", cause=str(error))
            return ExitCode.CONFIG
        except OSError as error:
            log.error("port_unavailable", cause=str(error))
            return ExitCode.PORT_IN_USE
        code = await _serve(settings, hub, server, stop)
    log.info("coordinator_stopped")
    return code


async def _start(settings: CoordinatorSettings, started: AsyncExitStack) -> tuple[Hub, RunningServer]:
    """Raises LedgerError, ConfigError and OSError; what runs by then is on `started`."""
    hub = await _open_hub(settings, started)
    carrier = Carrier(hub, settings.ready_limit_seconds + settings.go_limit_seconds, settings.tls)
    hub.start_carry = carrier.start
    proxy = RolloutProxy(hub, settings.max_rollout_calls, settings.tls)
    started.push_async_callback(proxy.close)
    # The contract's own port is the last: nobody is served by a coordinator that ends because another was taken.
    started.callback(serve_metrics(settings.metrics_listen, FleetMetrics(lambda: hub.view.value), tls=settings.tls))
    page = await started.enter_async_context(serve_page(settings.web_listen, hub.view, _guard_of_page(settings)))
    more = [add_channelz] if settings.channelz else []
    security = ServerSecurity(settings.tls, settings.insecure, settings.run_id, settings.rate)
    server = await start_server(settings.listen, [*_services(hub, proxy), *more], security)
    started.push_async_callback(server.stop)
    started.push_async_callback(carrier.close)
    if page:
        log.info("page_ready", url=page)
        if settings.web_address_file is not None:
            write_whole(settings.web_address_file, page)
    return hub, server


async def _open_hub(settings: CoordinatorSettings, started: AsyncExitStack) -> Hub:
    """On what the ledger remembers; its one thread writes it. Raises LedgerError."""
    loop = asyncio.get_running_loop()
    writer = started.enter_context(ThreadPoolExecutor(1, thread_name_prefix="ledger"))
    ledger = SqliteLedger(settings.state_dir / "ledger.sqlite")
    recovered = await loop.run_in_executor(writer, ledger.open, RunId(settings.run_id))
    started.push_async_callback(loop.run_in_executor, writer, ledger.close)
    core = FleetCore(_fleet_settings(settings), recovered, time.monotonic())
    return Hub(core, ledger, writer, settings.heartbeat_seconds)


def _guard_of_page(settings: CoordinatorSettings) -> HttpGuard:
    """Raises ConfigError: its files cannot be used."""
    try:
        return HttpGuard(http_tls(settings.tls, settings.web_tokens), settings.run_id)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError("", str(error)) from error


async def _serve(settings: CoordinatorSettings, hub: Hub, server: RunningServer, stop: asyncio.Event) -> int:
    await server.set_serving(not hub.core.recovering, besides=READS)
    ticker = asyncio.create_task(hub.tick_forever(settings.lease_ttl_seconds / TICKS_PER_TTL))
    publisher = asyncio.create_task(hub.publish_forever())
    supervisor = Supervisor()
    readiness = asyncio.create_task(_follow_readiness(hub, server, supervisor))
    signalled = asyncio.create_task(wait_for_signal(stop))
    feeding = asyncio.create_task(supervisor.feed(lambda: hub.ticks))
    measuring = asyncio.create_task(watch_loop())
    log.info("coordinator_ready", address=server.address, run_id=settings.run_id, coordinator_term=hub.core.term)
    if settings.address_file is not None:
        write_whole(settings.address_file, server.address)
    supervisor.ready(_in_a_line(hub.view.value))
    try:
        ends: set[asyncio.Future[Any]] = {ticker, publisher, signalled, hub.failed}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if hub.failed.done():
            log.error("ledger_failed", cause=str(hub.failed.result()))
            return ExitCode.LEDGER
        for task in (ticker, publisher):
            if task.done():
                task.result()
        return ExitCode.OK
    finally:
        supervisor.stopping()
        for task in (ticker, publisher, readiness, signalled, feeding, measuring):
            task.cancel()


async def _follow_readiness(hub: Hub, server: RunningServer, supervisor: Supervisor) -> None:
    """NOT_SERVING while recovering: reads are allowed, updates are not."""
    said = ""
    async for view in hub.view.watch():
        await server.set_serving(not view.recovering, besides=READS)
        if said != (said := _in_a_line(view)):
            supervisor.status(said)


def _in_a_line(view: operator_pb2.FleetView) -> str:
    """For `systemctl status`: what is served, and by how many engines."""
    versions = {m.model: " and ".join(f"{v.term}.{v.number}" for v in m.served) for m in view.state.models}
    served = [f"{model} {said or 'unset'}" for model, said in versions.items()]
    routable = f"{sum(engine.routable for engine in view.engines)} of {len(view.engines)} engines routable"
    recovering = ["recovering"] if view.recovering else []
    return ", ".join([*recovering, f"run {view.run_id}", f"term {view.coordinator_term}", *served, routable])


def _fleet_settings(settings: CoordinatorSettings) -> FleetSettings:
    return FleetSettings(
        run_id=RunId(settings.run_id),
        lease_ttl_seconds=settings.lease_ttl_seconds,
        step_limit_seconds=settings.step_limit_seconds,
        ready_limit_seconds=settings.ready_limit_seconds,
        go_limit_seconds=settings.go_limit_seconds,
        policy=UpdatePolicy(
            Mode(settings.update_mode), settings.update_quorum or None, parse_min_engines(settings.min_engines)
        ),
        max_carries=settings.max_catch_ups,
        canary_tolerance=settings.canary_tolerance,
        transport=None if settings.transport == "auto" else Transport(settings.transport),
        link_fate=LinkFate(settings.link_fate),
    )


def parse_min_engines(texts: Sequence[str]) -> dict[str, int]:
    """`("decode=2",)` as a table. Raises InvalidRequest."""
    found: dict[str, int] = {}
    for text in texts:
        group, _, number = text.rpartition("=")
        if not number.isdecimal():
            raise InvalidRequest("min_engines", f"{text!r} is not group=number")
        found[group] = int(number)
    return found


def _services(hub: Hub, proxy: RolloutProxy) -> list[Callable[[grpc.aio.Server], str]]:
    def add_fleet(server: grpc.aio.Server) -> str:
        fleet_pb2_grpc.add_FleetServicer_to_server(FleetService(hub), server)
        return fleet_pb2.DESCRIPTOR.services_by_name["Fleet"].full_name

    def add_operator(server: grpc.aio.Server) -> str:
        operator_pb2_grpc.add_OperatorServicer_to_server(OperatorService(hub), server)
        return operator_pb2.DESCRIPTOR.services_by_name["Operator"].full_name

    def add_rollout(server: grpc.aio.Server) -> str:
        rollout_pb2_grpc.add_RolloutServicer_to_server(proxy, server)
        return rollout_pb2.DESCRIPTOR.services_by_name["Rollout"].full_name

    return [add_fleet, add_operator, add_rollout]
