"""The boundary between kvass and the engine: no failure of kvass may reach a request.

A failure becomes a cache miss. It is counted under a name. The first failure of a name is logged.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger("kvass.engine")


class Boundary:
    """A runner of kvass's part of the engine's hooks. ``counters``: how many failures, by name."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()

    def run(self, miss: R, call: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """The result of ``call(...)``, or ``miss`` if it raises."""
        try:
            return call(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - a defect of kvass is a miss for the engine
            self.failed(getattr(call, "__name__", repr(call)), error)
            return miss

    def failed(self, name: str, error: Exception) -> None:
        """Count ``error`` under ``name``. The first error of a name is logged with its
        traceback."""
        self.counters[name] += 1
        if self.counters[name] == 1:
            log.error("%s failed and counts as a miss from here on", name, exc_info=error)

    def count(self, name: str, text: str, *args: object) -> None:
        """Count an expected failure under ``name``. The first failure of a name is logged as a
        warning."""
        self.counters[name] += 1
        if self.counters[name] == 1:
            log.warning(text, *args)


def log_off(reason: object, scheduler: bool) -> None:
    """Log that kvass is off: as an error in the scheduler, as a warning in a worker, which may know
    a reason that the scheduler does not know."""
    if scheduler:
        log.error("kvass is off, the engine runs uncached: %s", reason)
    else:
        log.warning("kvass is off in this worker: %s", reason)


def on_thread(name: str, call: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
    """Run ``call(...)`` on a daemon thread of this name. The future gets its result or its
    exception. Cancel the future if the result is not needed any more."""
    found: Future[R] = Future()

    def run() -> None:
        with suppress(InvalidStateError):  # it was cancelled
            try:
                found.set_result(call(*args, **kwargs))
            except Exception as error:  # noqa: BLE001 - whoever waits must get any error
                found.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return found
