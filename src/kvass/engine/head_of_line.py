"""Against head-of-line blocking, in engines that look at all waiting requests in one order.

Such an engine stops at the first request for which it has no room. Requests whose load has ended
may wait behind it. They hold blocks, or room is reserved for them because their load failed; while
the engine does not come to them they give nothing back, and if no other request runs, none ever
will again. So the first is told to ask again, as if its lookup were pending: the engine passes over
it and comes to the others. No hit is lost by that: what was matched stays held.

Laws of this file:

- A request is passed over only if it was answered and got no blocks, and only while another whose
  load has ended waits for its turn.
- Whoever has no turn and asks later in that step is passed over too, so nobody overtakes.
- If that brings nobody a turn, the next step begins anew: each is answered every second step, or
  after so many steps as there are requests whose load has ended.

An engine admits a load only if everything that was admitted before it still fits. So when nothing
runs there is room for each request whose load has ended, and it suffices that one gets its turn.
"""

from __future__ import annotations

from collections.abc import Iterable


class HeadOfLine:
    """Which requests are to be passed over. Used from the engine's scheduler thread only."""

    def __init__(self) -> None:
        self._loaded: set[str] = set()
        """Their load has ended, and they did not come to run yet."""
        self._tried: set[str] = set()
        """Were answered and got no blocks, in the steps before this one."""
        self._answered: set[str] = set()
        """As ``_tried``, in this step."""
        self._passing = self._came_to_run = False
        """Whether somebody was passed over in this step, and somebody then got blocks."""

    def passes(self, name: str) -> bool:
        """The engine asks for a match of a request: whether to tell it to ask again."""
        if name in self._tried and not self._loaded <= self._tried:
            self._passing = True
            return True
        return self._passing and name not in self._loaded

    def answered(self, name: str) -> None:
        """The engine was told how many tokens of a request to load."""
        self._answered.add(name)

    def loaded(self, names: Iterable[str]) -> None:
        """Loads ended, also of other connectors of this engine."""
        self._loaded.update(names)

    def given(self, name: str) -> None:
        """A request got blocks, to run or for a load."""
        self._came_to_run |= self._passing
        self.ended(name)

    def ended(self, name: str) -> None:
        """A request ended."""
        for names in (self._loaded, self._tried, self._answered):
            names.discard(name)

    def new_step(self) -> None:
        """The engine has looked at its waiting requests."""
        useful = self._passing and (self._answered or self._came_to_run)
        self._tried = self._tried | self._answered if useful else self._answered
        self._answered, self._passing, self._came_to_run = set(), False, False
