"""Hosts of our own on one machine: network namespaces with an address each, on one switch, that can be cut off.

Promises that nothing outside them is touched, and that they are gone afterwards. Needs root and `ip`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

WHY_NOT = "" if os.geteuid() == 0 and shutil.which("ip") else "network namespaces need root and ip"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=10, capture_output=True)


@dataclass(frozen=True)
class Host:
    """One namespace."""

    name: str
    address: str
    space: str
    switch: str
    port: str
    """The switch's end of its cable."""

    def inside(self, *command: str) -> list[str]:
        """A command that runs there."""
        return ["ip", "netns", "exec", self.space, *command]

    def unplug(self) -> None:
        """Nothing comes or goes."""
        ip("-n", self.switch, "link", "set", self.port, "down")

    def plug_in(self) -> None:
        ip("-n", self.switch, "link", "set", self.port, "up")

    def lose_what_is_sent_to(self, other: Host) -> None:
        """One way: what `other` sends here arrives."""
        ip("-n", self.space, "route", "add", "blackhole", f"{other.address}/32")

    def send_to(self, other: Host) -> None:
        ip("-n", self.space, "route", "del", "blackhole", f"{other.address}/32")


@contextmanager
def hosts(*names: str) -> Iterator[Sequence[Host]]:
    """So many hosts on one switch."""
    tag = uuid.uuid4().hex[:6]
    switch = f"wp-{tag}"
    made = [
        Host(name, f"10.213.8.{i}", f"wp-{tag}-{i}", switch, f"wp{tag}p{i}") for i, name in enumerate(names, start=1)
    ]
    spaces = [switch, *(host.space for host in made)]
    try:
        for space in spaces:
            ip("netns", "add", space)
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for host in made:
            _cable(host)
        yield made
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], check=False, timeout=10, capture_output=True)


def _cable(host: Host) -> None:
    ip("-n", host.switch, "link", "add", host.port, "type", "veth", "peer", "name", "eth0", "netns", host.space)
    ip("-n", host.switch, "link", "set", host.port, "master", "bridge", "up")
    ip("-n", host.space, "addr", "add", f"{host.address}/24", "dev", "eth0")
    for link in ("lo", "eth0"):
        ip("-n", host.space, "link", "set", link, "up")
