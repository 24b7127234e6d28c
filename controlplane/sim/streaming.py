"""A streaming install at a simulated engine: parts go in as they come, as in `engine_agent.life.streaming`.

It takes its turn on the engine with the first chunk, stands still when that one is checked, and goes to its end with
the commit frame. What cuts it is seen between two of its steps, never inside one.
"""

from __future__ import annotations

from controlplane.core import engine_effects as fx
from controlplane.core import engine_events as ee
from controlplane.core import errors as e
from controlplane.sim.engine import InstallEnding, Turns
from controlplane.sim.installs import Installs
from controlplane.sim.kernel import Action
from controlplane.sim.life import Life
from controlplane.sim.surroundings import Surroundings


class StreamingInstall:
    """One, in one life. `put`, `finish` and `cut` are its stream's."""

    def __init__(
        self, life: Life, installs: Installs, around: Surroundings, start: fx.StartStreaming, ending: InstallEnding
    ) -> None:
        self._life = life
        self._installs = installs
        self._around = around
        self._stream = start.stream
        self._update = start.update
        self._ending = ending
        self._fails_late = around.kernel.rng.random() < 0.5
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
            self._installs.stand_still(self._update, self._quiet)
        elif self._parts:
            self._work(self._put_in)
        elif self._finish:
            self._work(self._loaded)

    def _work(self, then: Action) -> None:
        self._working = True
        self._life.after(self._installs.install_seconds(0.3), then)

    def _over(self, error: e.WeightplaneError) -> None:
        self._working = True
        self._installs.failed(self._stream, error, touched=self._update.quiesced)

    def _quiet(self) -> None:
        if self._installs.fails_quieting(self._stream, self._update, self._ending):
            return
        if self._cut is not None:  # the stream ended meanwhile, and nothing was touched
            self._over(self._cut)
            return
        self._life.apply(ee.Quiesced())
        self._around.faults.point(self._life.agent, "engine.mid_install")
        self._around.witness.install_begins(self._life)
        self._life.engine.install_begins()
        self._then_step()

    def _put_in(self) -> None:
        self._around.faults.point(self._life.agent, "engine.mid_streaming")
        if not self._fails_late and self._fails():
            return
        told = self._parts.pop(0)
        self._working = False
        told()
        self._step()

    def _loaded(self) -> None:
        if not self._fails():
            self._installs.loaded(self._stream, self._update, self._ending)

    def _fails(self) -> bool:
        """Whatever a worker says of one part, an earlier one may be in."""
        if self._ending is InstallEnding.UNTOUCHED:
            error = e.InstallFailed(self._life.agent.name, str(self._update.version), True, "no byte could be read")
            self._over(error)
            return True
        return self._installs.fails_loading(self._stream, self._update, self._ending)


class StreamingInstalls:
    """Those of one incarnation, one at a time."""

    def __init__(self, life: Life, installs: Installs, turns: Turns, around: Surroundings) -> None:
        self._life = life
        self._installs = installs
        self._turns = turns
        self._around = around
        self._latest: StreamingInstall | None = None

    def start(self, effect: fx.StartStreaming) -> StreamingInstall:
        """Only its end opens the gate from here on; until the commit frame its stream may cut it (INV-4)."""
        ending = self._installs.ending()
        install = self._latest = StreamingInstall(self._life, self._installs, self._around, effect, ending)
        self._turns.take(install.begin)
        return install

    def cut(self, error: e.WeightplaneError) -> None:
        """The stream of the one that is under way ended in its middle."""
        assert self._latest is not None
        self._latest.cut(error)
