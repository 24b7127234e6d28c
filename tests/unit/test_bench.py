"""The benchmark's own promises: contenders take turns, nothing that failed is dropped, and other rows' lines stay."""

from __future__ import annotations

import math

from bench.harness import Row, interleave, paired_ratio, percentile, spread
from bench.run import deadline_of, row_files
from bench.table import BEGIN, END, in_docs, lines_of

WHERE = {"at": "2026-01-02T03:04:05+00:00", "commit": "abc", "load_1m": 0.5}
ROW = Row("small", "this | that", 1.5, 3.0, "ms", 0.5, "<= 1", True, samples={"ours": [1.0, 1.5, 2.0]})


def test_contenders_take_turns_and_warm_ups_are_not_counted() -> None:
    called: list[str] = []

    def contender(name: str) -> float:
        called.append(name)
        return float(len(called))

    found = interleave({"a": lambda: contender("a"), "b": lambda: contender("b")}, rounds=2, warm_up=1)
    assert "".join(called) == "abbaab"
    assert found == {"a": [4.0, 5.0], "b": [3.0, 6.0]}


def test_a_spread_names_the_middle_half_and_the_worst() -> None:
    found = spread([float(i) for i in range(1, 101)])
    assert (found.count, found.median, found.p99, found.worst) == (100, 50.5, 99.0, 100.0)
    assert math.isclose(found.low, 25.75)
    assert percentile([3.0], 99) == 3.0
    assert paired_ratio([1.0, 10.0, 3.0], [2.0, 20.0, 1.0]) == 0.5


def test_a_row_that_failed_is_a_line_that_says_so() -> None:
    (line,) = lines_of("push", WHERE, [], why="not done after 5 s")
    assert "**failed**" in line
    assert "not done after 5 s" in line


def test_a_run_of_some_rows_replaces_their_lines_and_no_others() -> None:
    page = f"before\n{BEGIN}\n{END}\nafter\n"
    page = in_docs(page, {"push": lines_of("push", WHERE, [ROW]), "aside": lines_of("aside", WHERE, [ROW])})
    page = in_docs(page, {"push": lines_of("push", WHERE, [], why="it broke")})
    lines = [line for line in page.splitlines() if line.startswith("| `")]
    assert [line.split("`")[1] for line in lines] == ["aside", "push"]
    assert "1.5 ms (1.25–1.75) | 3 ms | 0.50 | <= 1 | yes | this \\| that" in lines[0]
    assert "it broke" in lines[1]
    assert page.startswith("before\n")
    assert page.endswith(f"{END}\nafter\n")


def test_every_file_with_a_measure_of_rows_is_run_and_scripts_are_not() -> None:
    assert {"control_cost", "planner", "sessions"} <= set(row_files())
    assert "harness" not in row_files()
    assert deadline_of("planner", quick=True) <= 60
