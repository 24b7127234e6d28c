"""The whole run's own tests; `tests/conftest.py` puts them last."""

from __future__ import annotations

import pytest

from controlplane.core.errors import error_classes
from tests.conftest import engine_starts, left_out, produced
from tests.support.engine_starts import LIMIT


def test_each_reason_is_produced_by_some_test() -> None:
    """By the product's code, in a test's own process: a reason that nothing produces is a promise that nobody keeps."""
    assert left_out == [], "nothing is proven by a run that leaves these out"
    of_the_tree = {c.reason for c in error_classes() if c.__module__ == "controlplane.core.errors"}
    assert sorted(of_the_tree - produced.keys()) == []


def test_no_more_real_engines_were_started_than_the_run_has_time_for(pytestconfig: pytest.Config) -> None:
    if "not slow" not in pytestconfig.option.markexpr:
        pytest.skip("the slow tests start as many as they need")
    assert 0 < engine_starts.count <= LIMIT
