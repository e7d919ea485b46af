"""What waits for a step of vLLM that nobody makes.

A file of vLLM's version (see ``adapt.py``).

An engine core in a process of its own makes steps as long as a connector has work. An engine in its
user's process stops with its last answer, when the last stores are offered but not copied. So it is
asked for some more steps, and at its shutdown, its process's end and before a reset the steps are
made here. In any engine, a reset waits for the copies that alone would make it fail.

Laws of this file:

- A step is made here only if no request lives, so it computes nothing.
- A shutdown and a reset wait for at most ``FINISH_S``, the end of a user's ``generate`` for at most
  ``ANSWERS_S``. In a step, and in the call that asks the ranks, vLLM waits for its ranks as always.

Facts relied on:

- ``InprocClient`` makes the ``EngineCore`` of a user's process. Who drives it makes steps while
  ``LLMEngine.has_unfinished_requests()`` is true, which asks the client's ``dp_engines_running``.
  With data parallelism it does not, and no rank may make a step alone.
- ``EngineCore.shutdown`` shuts down the executor first.
- Between two steps, workers carry out a call of ``collective_rpc`` after all earlier ones.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Callable
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, Final

from kvass.connectors.vllm import borrowed
from kvass.engine.boundary import Boundary
from kvass.engine.planner import Planner

if TYPE_CHECKING:
    from kvass.connectors.vllm.adapt import StepReport

FINISH_S: Final = 5.0
"""The longest time that a shutdown or a reset waits. A daemon that does not answer costs less:
then the offers are given up (``client.scheduler.LATE_S``)."""
ANSWER_S: Final = 0.5
"""How long after its last request, or after the last answer, an engine is asked for steps while an
offer is not answered. Then the offer is given up."""
ANSWERS_S: Final = 2.0
"""The same, after its last request and for all offers together."""
COPIED_S: Final = 0.05
"""The same while copies run, which go on without steps, and if the daemon is overdue already."""
PAUSE_S: Final = 0.001
"""The pause between two steps that compute nothing, as in the loop of vLLM's own process."""

workers: Final[dict[str, weakref.WeakMethod[Callable[[float], StepReport | None]]]] = {}
"""What ``report_copies`` calls in this process, by engine."""


class Rest:
    """The end of an engine's stores while it rests. Made by the scheduler's connector, in the
    constructor of ``core``. All methods are called from the scheduler's thread.

    ``instance``: the engine's name (``EngineSetup.instance``).
    """

    def __init__(self, core: Any, instance: str, boundary: Boundary) -> None:
        self.boundary = boundary
        self.planner: Planner | None = None
        """Set it before the first request."""
        self._core = weakref.ref(core)
        self._rpc = borrowed.weak_reference(core.model_executor.collective_rpc)
        self._instance = instance
        self._process = 0
        """The process in which steps may be made here; 0: none are made."""
        self._ended_s = self._answered_s = 0.0
        """When the last request ended, and when an offer was last answered since."""
        self._offers = 0

    def make_steps(self, client: Any) -> None:
        """Make steps from now on when nobody else does. ``client`` is the engine's
        ``InprocClient``."""
        core = self._core()
        if core is None or core.vllm_config.parallel_config.data_parallel_size > 1:
            return
        self._process = os.getpid()
        borrowed.ask_for_steps(client, lambda: self.boundary.run(False, self._step_wanted))
        finish = partial(_finish, weakref.ref(self))
        atexit.register(finish)
        borrowed.call_before_shutdown(core.model_executor, finish)

    def request_ended(self) -> None:
        """A request ended just now."""
        self._ended_s = self._answered_s = time.monotonic()

    def _step_wanted(self) -> bool:
        planner, now = self.planner, time.monotonic()
        if planner is None or not self._may_step() or not planner.storing():
            return False
        before, self._offers = self._offers, planner.stores.offers()
        if self._offers < before:
            self._answered_s = now
        most_s = ANSWER_S if self._offers and not planner.client.silent_s else COPIED_S
        if now - self._answered_s > most_s or now - self._ended_s > ANSWERS_S:
            planner.stores.abandon_pending()  # or the daemon would keep rows for it
            return False
        time.sleep(PAUSE_S)
        return True

    def _may_step(self) -> bool:
        """Whether a step is possible here and computes nothing."""
        core = self._core()
        if core is None or os.getpid() != self._process:
            return False
        return not any(core.scheduler.get_request_counts())

    def finish(self) -> float:
        """If no request lives, make steps until what ended requests left is stored. Returns how
        much of ``FINISH_S`` is left, in seconds."""
        core, planner, until_s = self._core(), self.planner, time.monotonic() + FINISH_S
        if core is None or planner is None:
            return FINISH_S
        while self._may_step() and planner.storing() and time.monotonic() < until_s:
            _, computed = core.step_fn()
            core.post_step(computed)
            time.sleep(PAUSE_S)
        return max(0.0, until_s - time.monotonic())

    def close(self) -> None:
        """The engine is shut down: make no step."""
        self._process = 0

    def await_copies(self, most_s: float) -> StepReport | None:
        """Wait until no rank copies, or for ``most_s`` in each rank. The report of all ranks; None
        if there is nothing to report. Call it between two steps: vLLM waits for its ranks as it
        does in each step."""
        if (rpc := self._rpc()) is None:
            return None
        reports: list[StepReport | None] = rpc(report_copies, args=(self._instance, most_s))
        given = [one for one in reports if one is not None]
        return reduce(lambda one, other: one.aggregate(other), given) if given else None


def begin(instance: str, boundary: Boundary) -> Rest | None:
    """For the scheduler's connector of engine ``instance``, while vLLM constructs it and before
    ``rpcs.watch``. None: no engine core does."""
    if (core := borrowed.engine_core()) is None:
        return None
    rest = Rest(core, instance, boundary)
    if (client := borrowed.in_process_client()) is not None:
        rest.make_steps(client)
    return rest


def _finish(of: weakref.ref[Rest]) -> None:
    """``Rest.finish`` for vLLM's shutdown and the end of the process, which it must not disturb."""
    if (rest := of()) is not None:
        rest.boundary.run(None, rest.finish)
        rest.close()


def report_copies(worker: object, instance: str, most_s: float) -> StepReport | None:
    """In the process of a worker of engine ``instance``: wait until its copies have ended, for at
    most ``most_s``, and return its report."""
    reference = workers.get(instance)
    report = None if reference is None else reference()
    return None if report is None else report(most_s)
