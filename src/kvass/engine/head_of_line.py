"""The prevention of head-of-line blocking, for engines that have one queue of waiting requests.

Such an engine stops at the first request for which it has no free blocks. Requests whose load has
ended may wait behind that request. They hold blocks, or blocks are reserved for them because their
load failed. If no other request runs, no block ever becomes free, and the engine is stuck.

So the first request gets the answer that its lookup is pending. The engine then passes over it, and
reaches the requests behind it. No hit is lost: the lease of the first request is kept.

Laws of this file:

- A request is passed over only if it was answered before and got no blocks, and only while the
  engine has not reached all requests whose load has ended.
- A request without an ended load that is looked up later in the same step is passed over, too. So
  no request overtakes another one.
- If passing over lets no request be answered or run, the next step starts from the beginning. So
  each request is answered every second step, or after as many steps as there are requests whose
  load has ended.

A load begins only if all that began before still fits (``load_admission.py``, or the engine's own
count). So when nothing runs, there are blocks for each request whose load has ended, and it
suffices to reach one of them. With windows or states a request whose load failed may need more, but
it gave back what it held when it was reached: then the next one has room.
"""

from __future__ import annotations

from collections.abc import Iterable


class HeadOfLine:
    """The choice of the requests that are passed over in a step. Used from the engine's scheduler
    thread only."""

    def __init__(self) -> None:
        self._loaded: set[str] = set()
        """Requests whose load has ended and that have not run since."""
        self._tried: set[str] = set()
        """Requests that were answered in earlier steps and got no blocks."""
        self._answered: set[str] = set()
        """Requests that were answered in this step and have got no blocks."""
        self._passing = self._came_to_run = False
        """``_passing``: a request was passed over in this step. ``_came_to_run``: after that a
        request got blocks."""

    def passes(self, name: str) -> bool:
        """Whether the lookup of a request must be answered as pending, so that the engine passes
        over the request."""
        if name in self._tried and not self._loaded <= self._tried:
            self._passing = True
            return True
        return self._passing and name not in self._loaded

    def held_back(self) -> None:
        """The engine passes over a request, because there are no blocks for its load yet
        (``load_admission.py``)."""
        self._passing = True

    def answered(self, name: str) -> None:
        """The lookup of a request was answered with a number of tokens."""
        self._answered.add(name)

    def loaded(self, names: Iterable[str]) -> None:
        """Loads of these requests ended. They may be loads of other connectors of the engine."""
        self._loaded.update(names)

    def got_blocks(self, name: str) -> None:
        """The engine allocated blocks for a request, to run it or to load into."""
        self._came_to_run |= self._passing
        self.ended(name)

    def ended(self, name: str) -> None:
        """A request ended."""
        for names in (self._loaded, self._tried, self._answered):
            names.discard(name)

    def new_step(self) -> None:
        """The engine has gone through its queue: the next step begins."""
        useful = self._passing and (self._answered or self._came_to_run)
        self._tried = self._tried | self._answered if useful else self._answered
        self._answered, self._passing, self._came_to_run = set(), False, False
