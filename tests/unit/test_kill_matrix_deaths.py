"""Which deaths of a real engine are tried, and how they get into the page without touching the rest of it."""

from __future__ import annotations

import pytest

from tests.kill_matrix.deaths import DEATHS, HEAD, Dying, Victim, deaths, put_into, section, section_of
from tests.kill_matrix.matrix import Outcome

PAGE = "# Page\n\ntext\n\n## kill -9\n\ntable\n"


def test_each_is_found_by_its_name() -> None:
    assert deaths("") == deaths("deaths") == DEATHS
    assert all(deaths(f"deaths:{d.name}") == (d,) for d in DEATHS)
    with pytest.raises(ValueError, match="no death is named 'nobody'; there are core_idle"):
        deaths("deaths:nobody")


def test_a_core_dies_idle_generating_in_a_transfer_and_in_an_install_and_an_agent_both_ways() -> None:
    cores = [d for d in DEATHS if d.victim is Victim.CORE]
    assert [(d.point, d.generating) for d in cores] == [
        ("trainer.before_open", False),
        ("trainer.before_open", True),
        ("trainer.between_chunks", False),
        ("worker.install", False),
    ]
    assert [d.stopped_seconds for d in DEATHS if d.victim is Victim.AGENT] == [0.0, 30.0]


def test_a_row_has_its_seconds_and_a_failure_stands_out() -> None:
    text = section([Dying(DEATHS[0], Outcome.DEGRADED, 0.3, 21.04), Dying(DEATHS[1], None, problems=("it lied",))])
    assert "| EngineCore is killed while it is idle | degraded | 0.3 s | 21.0 s |" in text
    assert "**failed** unknown" in text
    assert "- agent_killed: it lied" in text


def test_the_section_is_put_at_the_end_and_later_in_its_own_place() -> None:
    first, second = f"{HEAD}\n\none\n", f"{HEAD}\n\ntwo\n"
    page = put_into(PAGE, first)
    assert page == f"{PAGE}\n{first}"
    assert section_of(page).strip() == first.strip()
    assert put_into(page, second) == f"{PAGE}\n{second}"
    assert section_of(PAGE) == ""
