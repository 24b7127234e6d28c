"""The command line of the demo. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from controlplane.cli.demo.settings import DemoModel, DemoSettings, default_cache_dir
from controlplane.cli.ending import reported

Model = Annotated[DemoModel, typer.Option("--model", help="What to train: SmolLM2-135M, or a tiny random model.")]
Steps = Annotated[
    int | None,
    typer.Option("--steps", min=1, help="Training steps, each pushed to both engines.  [default: by model]"),
]
Verify = Annotated[
    bool, typer.Option("--verify", help="At the end compare both engines with a fresh one, token by token.")
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one line of JSON on stdout at the end; the rest goes to stderr.")
]
Keep = Annotated[
    Path | None, typer.Option("--keep", metavar="DIR", help="Work in DIR and keep it: logs, state, weights.")
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of prompts, sampling and training.")]
Listen = Annotated[
    str, typer.Option("--listen", metavar="HOST:PORT", help="Where the coordinator serves; port 0 takes any.")
]
Cache = Annotated[
    Path | None, typer.Option("--cache", metavar="DIR", help="Where models are kept.  [default: ~/.cache/weightplane]")
]
LimitSeconds = Annotated[
    float, typer.Option("--limit-seconds", help="Give up after this long; fetching the model does not count.")
]


@reported
def demo(
    model: Model = DemoModel.SMOLLM2,
    steps: Steps = None,
    verify: Verify = False,
    as_json: AsJson = False,
    keep: Keep = None,
    seed: Seed = 0,
    listen: Listen = "127.0.0.1:7070",
    cache: Cache = None,
    limit_seconds: LimitSeconds = 1800.0,
) -> int:
    """Train a small model here: a coordinator, two vLLM engines and a Megatron trainer of two ranks.

    Each step's policy reaches both engines; the table shows each engine's version as it moves. Ends with 0 if both
    engines hold the version that the fleet serves and, with --verify, answer as a fresh engine does.
    """
    from controlplane.cli.demo.run import run_demo

    settings = DemoSettings(
        model=model,
        steps=steps or model.default_steps,
        verify=verify,
        as_json=as_json,
        keep=keep,
        seed=seed,
        listen=listen,
        cache_dir=(cache or default_cache_dir()).absolute(),
        limit_seconds=limit_seconds,
    )
    return run_demo(settings)
