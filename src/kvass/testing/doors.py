"""Who has a session, to a witness: that nobody is kept out or sent away without a cause.

Law of this file: as ``witness``: events and effects only.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvass.core.effects import Close, Effect, Event, Opened
from kvass.core.session_limits import OBSERVERS
from kvass.messages import Error, FromDaemon
from kvass.testing.books import BrokenLawError
from kvass.types import Limits


@dataclass(eq=False, slots=True)
class Guest:
    """One open session."""

    uid: int
    own: bool
    since: float
    greeted: bool = False
    registered: bool = False


class Doors:
    """All open sessions, and what may become of them."""

    def __init__(self, limits: Limits, hello_s: float) -> None:
        self.limits = limits
        self.hello_s = hello_s
        self.guests: dict[int, Guest] = {}

    def opened(self, event: Opened, effects: list[Effect], now: float) -> None:
        """A newcomer is refused only if there is no place for it, and its own user never."""
        guest = Guest(event.uid, event.own, now)
        refused = Close(event.session) in effects
        others = list(self.guests.values())
        alike = [g for g in others if g.uid == event.uid]
        room = len(others) < self.limits.sessions and len(alike) < self.limits.sessions_per_uid
        if refused and (room or event.own):
            raise BrokenLawError(f"there was a place for {event}")
        if refused and any(not g.greeted for g in alike):
            raise BrokenLawError(f"{event} was refused, and others of its user say nothing")
        self.guests[event.session] = guest
        closed = [e for e in effects if isinstance(e, Close)]
        if len(closed) > 1 or (closed and room):
            raise BrokenLawError(f"law 12: more went than had to: {closed}")

    def may_end(self, session: int, event: Event, message: FromDaemon) -> bool:
        """Whether ``message`` may tell a session to go that did not ask."""
        guest = self.guests[session]
        if not isinstance(message, Error) or not message.fatal or message.code != "limit":
            return False
        looks = guest.own and not guest.registered and isinstance(event, Opened)
        return not guest.greeted or looks

    def ticked(self, effects: list[Effect], now: float) -> None:
        """Nobody stays who has not said Hello in time."""
        closed = {e.session for e in effects if isinstance(e, Close)}
        for session, guest in self.guests.items():
            if not guest.greeted and (now >= guest.since + self.hello_s) != (session in closed):
                raise BrokenLawError(f"{session} has said nothing since {guest.since}")

    def greeted(self, session: int) -> None:
        self.guests[session].greeted = True

    def registered(self, session: int) -> None:
        """It has a place now, of which there are so many."""
        self.guests[session].registered = True
        mine = [g for g in self.guests.values() if g.registered]
        alike = [g for g in mine if g.uid == self.guests[session].uid]
        if len(mine) > self.limits.sessions or len(alike) > self.limits.sessions_per_uid:
            raise BrokenLawError("law 12: more have registered than there are places")

    def left(self, session: int) -> None:
        """It ended; nobody may have more than there are places."""
        del self.guests[session]
        if len(self.guests) > self.limits.sessions + OBSERVERS:
            raise BrokenLawError("law 12: more sessions than places")
