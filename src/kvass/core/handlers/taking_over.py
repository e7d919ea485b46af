"""The daemon stops, and the next one gets its memory, because that has a place or the next one
asked (``TakeOver``).

Law of this file: nothing is granted from then on, so what is being written is soon either complete
or given up. Lookups are answered until the end.
"""

from __future__ import annotations

from kvass.core.clients.registry import ClientSession
from kvass.core.effects import Leave
from kvass.core.state import State
from kvass.core.tiers import flush
from kvass.errors import Refused
from kvass.messages import Leaving, TakeOver


def take_over(state: State, session: ClientSession, msg: TakeOver) -> Leaving:
    """Have the daemon stop."""
    if session.registered is not None or not session.own:
        raise Refused("forbidden", "only the daemon's own user takes over, not an engine")
    if msg.arena != state.config.place:
        here, there = (name or "in no folder" for name in (state.config.place, msg.arena))
        raise Refused("bad_value", f"arena: this daemon's is {here}, not {there[:200]}")
    state.leaving = True
    state.out.append(Leave(msg.within_s))
    return Leaving()


def stop(state: State) -> None:
    """The daemon stops: flush, and let what is being written become complete if it lasts."""
    state.leaving |= bool(state.config.place)
    flush.stop(state)
