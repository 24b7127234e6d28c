"""The benchmark: every row in a process of its own, the table of docs/benchmarks.md, and a plot for each file.

    python -m bench.run [--quick] [--only NAME]...

A row that fails or runs past its deadline is shown as failed, with its last words; it is never dropped. A quick run
prints its table and leaves the docs as they are; a run of some rows replaces those lines of the table and no others.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness import REPOSITORY, Row, environment
from bench.plots import plot
from bench.table import in_docs, lines_of

RESULTS = REPOSITORY / "build" / "bench"
DOCS = REPOSITORY / "docs" / "benchmarks.md"
IMAGES = REPOSITORY / "docs" / "images"
DEADLINE_SECONDS = {"DEADLINE_SECONDS": 600.0, "QUICK_DEADLINE_SECONDS": 60.0}
"""Of a file that states none."""
ALL_SECONDS = {False: 40 * 60.0, True: 3 * 60.0}
"""Of the whole run, by quick: what would start later is shown as not run."""
LAST_WORDS = 200


@dataclass(frozen=True, slots=True)
class Result:
    """Of one file: its rows, or why there are none."""

    file: str
    environment: dict[str, Any]
    rows: list[Row]
    why: str = ""


def row_files() -> list[str]:
    """Every file of bench/ that has a `measure`, in the order of their names."""
    return sorted(p.stem for p in Path(__file__).parent.glob("*.py") if _functions(p) & {"measure"} and _is_row(p))


def _functions(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def _is_row(path: Path) -> bool:
    """A `measure` with the one parameter `quick`: scripts of other shapes are run by hand."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == "measure":
            return [a.arg for a in node.args.args] == ["quick"]
    return False


def deadline_of(file: str, quick: bool) -> float:
    """Read from the source: the file's imports belong into its own process."""
    name = "QUICK_DEADLINE_SECONDS" if quick else "DEADLINE_SECONDS"
    for node in ast.parse((Path(__file__).parent / f"{file}.py").read_text()).body:
        if isinstance(node, ast.Assign) and [t.id for t in node.targets if isinstance(t, ast.Name)] == [name]:
            return float(ast.literal_eval(node.value))
    return DEADLINE_SECONDS[name]


def run(file: str, quick: bool, seconds: float) -> Result:
    """In a process group of its own, which is gone at the deadline."""
    out, log = RESULTS / f"{file}.json", RESULTS / f"{file}.log"
    out.unlink(missing_ok=True)
    words = [sys.executable, "-m", "bench.harness", file, "--out", str(out), *(["--quick"] if quick else [])]
    before = environment()
    with log.open("wb") as sink:
        process = subprocess.Popen(words, cwd=REPOSITORY, stdout=sink, stderr=sink, start_new_session=True)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return _failed(file, before, f"not done after {seconds:.0f} s")
        finally:
            _end(process)
    if status or not out.exists():
        return _failed(file, before, f"exit status {status}: {_last_words(log)}")
    found = json.loads(out.read_text())
    return Result(file, found["environment"], [Row(**row) for row in found["rows"]])


def _end(process: subprocess.Popen[bytes]) -> None:
    """The row's helpers too: they are of its group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " ".join(lines[-1].split())[:LAST_WORDS] if lines else "it said nothing"


def _failed(file: str, where: dict[str, Any], why: str) -> Result:
    (RESULTS / f"{file}.json").write_text(json.dumps({"file": file, "environment": where, "failed": why}) + "\n")
    return Result(file, where, [], why)


def run_all(files: list[str], quick: bool) -> list[Result]:
    RESULTS.mkdir(parents=True, exist_ok=True)
    end, results = time.monotonic() + ALL_SECONDS[quick], []
    for file in files:
        seconds = min(deadline_of(file, quick), end - time.monotonic())
        if seconds < 1:
            results.append(_failed(file, environment(), "not run: the whole run's time was over"))
            continue
        print(f"{file}: up to {seconds:.0f} s", file=sys.stderr, flush=True)
        results.append(run(file, quick, seconds))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small, in 3 minutes; the docs stay as they are")
    parser.add_argument("--only", action="append", metavar="NAME", help="this file's rows alone; may be repeated")
    given = parser.parse_args()
    files = row_files()
    if unknown := set(given.only or ()) - set(files):
        raise SystemExit(f"no such row: {', '.join(sorted(unknown))}; there are {', '.join(files)}")
    results = run_all(given.only or files, given.quick)
    lines = {r.file: lines_of(r.file, r.environment, r.rows, r.why) for r in results}
    for result in results:
        print("\n".join(lines[result.file]))
    if not given.quick:
        DOCS.write_text(in_docs(DOCS.read_text(), lines))
        for result in results:
            plot(result.file, result.rows, IMAGES / f"bench-{result.file}.svg")
    raise SystemExit(1 if any(r.why for r in results) else 0)


if __name__ == "__main__":
    main()
