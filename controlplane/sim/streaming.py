"""A streaming install at a simulated engine: parts go in as they come, as in `engine_agent.life.streaming`.

It takes its turn on the engine with the first chunk, stands still when that one is checked, and goes to its end with
the commit frame. What cuts it is seen between two of its steps, never inside one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from controlplane.core import engine_effects as fx
from controlplane.core import engine_events as ee
from controlplane.core import errors as e
from controlplane.sim.engine import InstallEnding
from controlplane.sim.kernel import Action

if TYPE_CHECKING:
    from controlplane.sim.agent import Life


class StreamingInstall:
    """One, in one life. `put`, `finish` and `cut` are its stream's."""

    def __init__(self, life: Life, start: fx.StartStreaming, ending: InstallEnding) -> None:
        self._life = life
        self._world = life.world
        self._stream = start.stream
        self._update = start.update
        self._ending = ending
        self._fails_late = life.world.kernel.rng.random() < 0.5
        """What goes wrong goes wrong at the end; else with the first part."""
        self._parts: list[Action] = []
        """What is told when each is in."""
        self._finish = False
        self._cut: e.WeightplaneError | None = None
        self._working = True
        """Something is under way; or its turn did not come yet."""

    # ---- the stream's side ----

    def put(self, told: Action) -> None:
        """`told` when the part is in."""
        self._parts.append(told)
        self._step()

    def finish(self) -> None:
        """The commit frame was taken, and every part before it was put."""
        self._finish = True
        self._step()

    def cut(self, error: e.WeightplaneError) -> None:
        """No more comes."""
        self._cut = self._cut or error
        self._step()

    # ---- the install ----

    def begin(self) -> None:
        """Its turn came."""
        self._then_step()

    def _then_step(self) -> None:
        self._working = False
        self._step()

    def _step(self) -> None:
        if self._working:
            return
        if self._cut is not None:
            self._over(self._cut)
        elif self._parts and not self._update.quiesced:
            self._working = True
            self._life.work.stand_still(self._update, self._quiet)
        elif self._parts:
            self._work(self._put_in)
        elif self._finish:
            self._work(self._loaded)

    def _work(self, then: Action) -> None:
        self._working = True
        self._life.after(self._life.work.install_seconds(0.3), then)

    def _over(self, error: e.WeightplaneError) -> None:
        self._working = True
        self._life.work.failed(self._stream, error, touched=self._update.quiesced)

    def _quiet(self) -> None:
        if self._life.work.fails_quieting(self._stream, self._update, self._ending):
            return
        if self._cut is not None:  # the stream ended meanwhile, and nothing was touched
            self._over(self._cut)
            return
        self._life.apply(ee.Quiesced())
        self._world.faults.point(self._life.agent, "engine.mid_install")
        self._world.witness.install_begins(self._life)
        self._life.engine.install_begins()
        self._then_step()

    def _put_in(self) -> None:
        self._world.faults.point(self._life.agent, "engine.mid_streaming")
        if not self._fails_late and self._fails():
            return
        told = self._parts.pop(0)
        self._working = False
        told()
        self._step()

    def _loaded(self) -> None:
        if not self._fails():
            self._life.work.loaded(self._stream, self._update, self._ending)

    def _fails(self) -> bool:
        """Whatever a worker says of one part, an earlier one may be in."""
        if self._ending is InstallEnding.UNTOUCHED:
            error = e.InstallFailed(self._life.agent.name, str(self._update.version), True, "no byte could be read")
            self._over(error)
            return True
        return self._life.work.fails_loading(self._stream, self._update, self._ending)
