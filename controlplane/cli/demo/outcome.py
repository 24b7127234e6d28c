"""What came of a demo, for machines and for people. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from controlplane.cli.demo.verify import Comparison, describe
from controlplane.core.versions import WeightVersion
from controlplane.exit_codes import ExitCode


@dataclass(frozen=True, slots=True)
class Outcome:
    """Fields are those of the last line of `--json`, but for `comparisons`, whose sum is `verified`."""

    steps: int
    reward_first: float | None
    reward_last: float | None
    versions: dict[str, WeightVersion | None]
    fleet_version: WeightVersion | None
    update_seconds_median: float | None
    comparisons: dict[str, Comparison] | None
    """None: not asked for."""
    seconds: float
    pss_peak_mib: int

    @property
    def verified(self) -> bool | None:
        """Every engine was compared, and equals the fresh one. None: it was not asked for."""
        if self.comparisons is None:
            return None
        everyone = self.comparisons.keys() == self.versions.keys()
        return everyone and all(c.verified for c in self.comparisons.values())

    @property
    def versions_agree(self) -> bool:
        return self.fleet_version is not None and set(self.versions.values()) == {self.fleet_version}

    @property
    def code(self) -> ExitCode:
        return ExitCode.OK if self.versions_agree and self.verified is not False else ExitCode.FAILED

    def to_json(self) -> str:
        fields: dict[str, Any] = {
            "steps": self.steps,
            "reward_first": self.reward_first,
            "reward_last": self.reward_last,
            "versions": {name: _version_json(v) for name, v in self.versions.items()},
            "fleet_version": _version_json(self.fleet_version),
            "update_seconds_median": self.update_seconds_median,
            "verified": self.verified,
            "seconds": self.seconds,
            "pss_peak_mib": self.pss_peak_mib,
        }
        return json.dumps(fields)

    def lines(self) -> list[str]:
        """For people."""
        engines = ", ".join(f"{name} {v or 'unset'}" for name, v in self.versions.items())
        agree = "all equal" if self.versions_agree else "NOT EQUAL"
        checked = describe(self.comparisons) if self.comparisons is not None else []
        rewards = f"{_reward(self.reward_first)} before, {_reward(self.reward_last)} after"
        return [
            f"{self.steps} steps; held-out reward: {rewards}",
            f"the fleet serves {self.fleet_version or 'nothing'}; {engines}: {agree}",
            f"an update took {self.update_seconds_median} s at the median",
            *checked,
            f"{self.seconds} s in all; at most {self.pss_peak_mib} MiB (summed PSS)",
        ]


def _version_json(version: WeightVersion | None) -> dict[str, int] | None:
    return None if version is None else {"term": version.term, "number": version.number}


def _reward(reward: float | None) -> str:
    return "unknown" if reward is None else f"{reward:.3f}"
