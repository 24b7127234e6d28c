"""Ids of traces and spans: the same in every process, other ones for every other update; and W3C's traceparent."""

from __future__ import annotations

import subprocess
import sys

import pytest

from controlplane.core.traces import PUSH, SEND, UPDATE, SpanRef, parse_traceparent, update_span, update_trace

RANDOM = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_another_process_derives_the_same_ids() -> None:
    program = "from controlplane.core.traces import *; print(update_span('run', 'u', SEND, 'engine-0'))"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=150, check=True)
    assert said.stdout.strip() == str(update_span("run", "u", SEND, "engine-0"))


def test_no_two_updates_and_no_two_spans_share_an_id() -> None:
    runs = [("a", "b"), ("ab", ""), ("", "ab"), ("a", "c"), ("a", "catch-up-1-1"), ("d", "catch-up-1-1")]
    assert len({update_trace(*run) for run in runs}) == len(runs)
    paths = [(UPDATE,), (PUSH,), (SEND, "e1"), (SEND, "e2"), (SEND, "e", "1"), (f"{SEND}e1",)]
    assert len({update_span("run", "u", *path).span_id for path in paths}) == len(paths)
    assert len({update_span("run", "u", *path).trace_id for path in paths}) == 1


def test_a_traceparent_is_read_and_written_as_it_stands() -> None:
    ref = parse_traceparent(RANDOM)
    assert ref == SpanRef(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, True)
    assert ref.traceparent == RANDOM
    assert parse_traceparent(RANDOM[:-1] + "0") == SpanRef(ref.trace_id, ref.span_id, False)
    later = parse_traceparent(f"cc{RANDOM[2:]}-what-is-to-come")
    assert later == ref, "later versions are read as far as this one goes"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello",
        RANDOM.upper(),
        RANDOM.replace("00-", "ff-", 1),
        RANDOM + "-more",
        RANDOM[:-3],
        "00-" + "0" * 32 + "-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-" + "0" * 16 + "-01",
    ],
)
def test_what_is_no_traceparent_is_ignored(text: str) -> None:
    assert parse_traceparent(text) is None
