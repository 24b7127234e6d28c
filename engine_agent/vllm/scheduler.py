"""Inside vLLM's cores: while a canary is in work it is alone, and when it has its answer its core stands still.

Kept requests went back to their prompts when the caches were cleared, so they would be computed anew beside the canary,
in its own forward pass or in the next: a second on a CPU, in which the gate is shut, and for nothing where the canary
finds fault. They are taken up when the agent, which stops the cores after each canary anyhow, lets them run.

vLLM says of schedulers that their interface is not public: this one is vLLM's own, whichever that is, with one limit
lowered for as long as a canary is there. A scheduler that has no such limit is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

CANARY = "weightplane-canary-"
"""How the names of their requests begin."""
LIMIT = "max_num_active_reqs"
"""Of vLLM's scheduler: no more requests than that are taken up."""


def canary_alone(*, vllm_config: Any, **more: Any) -> Any:
    """vLLM's scheduler for this configuration, made; named to vLLM as its `scheduler_cls`, which it calls."""
    if vllm_config.scheduler_config.async_scheduling:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler as Scheduler
    else:
        from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.sched.interface import PauseState

    scheduler = Scheduler(vllm_config=vllm_config, **more)
    let_canaries_be_alone(scheduler, lambda: scheduler.set_pause_state(PauseState.PAUSED_ALL))
    return scheduler


def let_canaries_be_alone(scheduler: Any, stand_still: Callable[[], None]) -> None:
    """Of a scheduler whose `requests` are by name, and which orders them by their priority. `stand_still` has it take
    up nobody until it is told to go on."""
    plain, there = scheduler.schedule, False
    if not hasattr(scheduler, LIMIT):
        return

    def schedule(*args: Any, **more: Any) -> Any:
        nonlocal there
        canaries = sum(name.startswith(CANARY) for name in scheduler.requests)
        if there and not canaries:
            stand_still()
        there = canaries > 0
        if not there:
            return plain(*args, **more)
        limit = getattr(scheduler, LIMIT)
        setattr(scheduler, LIMIT, min(limit, canaries))
        try:
            return plain(*args, **more)
        finally:
            setattr(scheduler, LIMIT, limit)

    scheduler.schedule = schedule
