"""The whole run's own test; `tests/conftest.py` puts it last."""

from __future__ import annotations

from controlplane.core.errors import error_classes
from tests.conftest import left_out, produced


def test_each_reason_is_produced_by_some_test() -> None:
    """By the product's code, in a test's own process: a reason that nothing produces is a promise that nobody keeps."""
    assert left_out == [], "nothing is proven by a run that leaves these out"
    of_the_tree = {c.reason for c in error_classes() if c.__module__ == "controlplane.core.errors"}
    assert sorted(of_the_tree - produced.keys()) == []
