"""Which requests an engine passes over that has one queue of waiting requests.

Such an engine stops at the first request for which it has no free blocks. Requests whose load has
ended may wait behind it, with all the blocks: then nothing ever runs. A request whose lookup is
pending is passed over, and its lease is kept.

Laws of this file:

- A request is passed over only if it had its turn and got no blocks, and only until the engine has
  reached all requests whose load has ended. These alone overtake others.
- If passing over was of no use, the next step passes over nobody. So each request has its turn
  every second step, or after as many steps as there are requests whose load has ended.

It suffices to reach one of these: a load begins only if all that began before fit
(``load_admission.py``, or the engine's own count), and one that failed has given back its blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class _Turns:
    """One step. ``answered``: requests that were answered and have got no blocks. ``passing``: a
    request was passed over. ``ran``: a request got blocks after that."""

    answered: set[str] = field(default_factory=set)
    passing: bool = False
    ran: bool = False

    @property
    def useful(self) -> bool:
        """Whether passing over let another request be answered or run."""
        return self.passing and (self.ran or bool(self.answered))


class HeadOfLine:
    """Used from the engine's scheduler thread only. ``one_queue``: whether the engine is such a
    one. In any other nobody is passed over."""

    def __init__(self, one_queue: bool) -> None:
        self._one_queue = one_queue
        self._loaded: set[str] = set()
        """Requests whose load has ended and that have not run since."""
        self._tried: set[str] = set()
        """Requests that were answered in earlier steps and got no blocks."""
        self._step = _Turns()

    def passes(self, name: str) -> bool:
        """Whether the engine passes over a request: its lookup must be answered as pending."""
        if not self._one_queue:
            return False
        had_its_turn = name in self._tried and not self._loaded <= self._tried
        self._step.passing |= had_its_turn
        return had_its_turn or (self._step.passing and name not in self._loaded)

    def held_back(self) -> None:
        """The engine passes over a request, because there are no blocks for its load yet
        (``load_admission.py``)."""
        self._step.passing = True

    def answered(self, name: str) -> None:
        """The lookup of a request was answered with a number of tokens."""
        self._step.answered.add(name)

    def loaded(self, names: Iterable[str]) -> None:
        """Loads of these requests ended. They may be loads of other connectors of the engine."""
        self._loaded.update(names)

    def got_blocks(self, name: str) -> None:
        """The engine allocated blocks for a request, to run it or to load into."""
        self._step.ran |= self._step.passing
        self.ended(name)

    def ended(self, name: str) -> None:
        """A request ended."""
        for names in (self._loaded, self._tried, self._step.answered):
            names.discard(name)

    def new_step(self) -> None:
        """The engine has gone through its queue: the next step begins."""
        step = self._step
        if step.passing or step.answered or self._tried:  # most steps have none
            self._tried = self._tried | step.answered if step.useful else step.answered
            self._step = _Turns()
