"""What watches the requests of an engine: figures, spans, explanations, KV events.

Laws of this file:

- An observer decides nothing about a request. What decides is asked by name (``head_of_line.py``,
  ``load_admission.py``, ``hit_limits.py``).
- All hooks are called from the engine's scheduler thread, in the order of the observers.
- Of one request the hooks come in the order in which they stand here. A lookup may come again: the
  engine repeats it until the request gets blocks, and after a preemption.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvass.client.lookups import Match
from kvass.engine.request_state import Answer, RequestState
from kvass.messages import Grant, Granted

if TYPE_CHECKING:
    from kvass.engine.offers import Offer


class Observer:
    """The hooks of an observer. Each does nothing unless a subclass has it."""

    def unasked(self, state: RequestState, local: int, why: str) -> None:
        """The daemon is not asked for a request, so nothing matches after its ``local`` tokens in
        the engine's own cache. ``why``: the reason (docs/explain.md)."""

    def asked(self, state: RequestState) -> None:
        """The daemon will be asked for a request. This is called in each step until the answer is
        there. While the answer is pending, ``state`` stays as it is."""

    def promoting(self, state: RequestState) -> None:
        """The answer is pending, because the daemon waits for tiers or for another engine's store.
        This follows ``asked`` in each such step."""

    def answered(self, state: RequestState, answer: Answer, first: bool) -> None:
        """What was asked is answered. A match stays held until the request gets blocks. ``first``:
        the request has got no blocks since, and it is the first answer."""

    def allocated(self, state: RequestState, answer: Answer, tokens: int) -> None:
        """The request got blocks after ``answer``. The engine loads ``tokens`` tokens into them,
        or nothing. This is called once at most after each ``answered``."""

    def loading(self, state: RequestState, match: Match) -> None:
        """A load of ``match`` is planned. It follows ``allocated``."""

    def loaded(self, name: str, state: RequestState | None, ok: bool) -> None:
        """The load of a request ended on all ranks, or failed on one. It may be a load of another
        connector. None: the request has ended."""

    def stored(self, offer: Offer, grant: Grant, granted: Granted) -> None:
        """The daemon answered an offer. The request may have ended. ``grant.chunks``: the chunks
        that the ranks will copy by ``granted.deadline_s``; the others have rows already, or there
        was no room."""

    def ended(self, state: RequestState) -> None:
        """The request finished or was aborted. Only ``loaded``, ``stored`` and ``unstored`` may
        follow."""

    def unstored(self, state: RequestState) -> None:
        """A request has ended, and its chunks from ``state.offered.chunks`` on are not stored. This
        may be called more than once for a request."""

    def stepped(self) -> None:
        """A step was planned and handed over."""
