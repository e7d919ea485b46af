"""``Commit``, ``Abort`` and ``HandedOver``: what becomes of reservations and leases.

A function per message. It returns nothing, or raises ``Refused`` before it changed anything.
"""

from __future__ import annotations

from kvass.core.clients.registry import ClientSession
from kvass.core.handlers.checks import open_lease, open_reservation, own_rank
from kvass.core.state import State
from kvass.errors import Refused
from kvass.messages import Abort, Commit, HandedOver
from kvass.types import SCHEDULER


def commit(state: State, session: ClientSession, msg: Commit) -> None:
    """A rank wrote its shard of every row of a reservation."""
    reservation = open_reservation(state, session, msg.boot, msg.reservation)
    rank = own_rank(session, msg.rank)
    if reservation is not None and rank in reservation.owing:  # else it was said twice, or settled
        state.settlement.commit(reservation, rank)


def abort(state: State, session: ClientSession, msg: Abort) -> None:
    """A rank will not write, or the scheduler never told anybody to."""
    reservation = open_reservation(state, session, msg.boot, msg.reservation)
    rank = own_rank(session, msg.rank)
    if reservation is None:
        return
    if rank != SCHEDULER:
        state.settlement.abort(reservation, rank)
    elif reservation.handed_over:
        what = f"reservation {msg.reservation}"
        raise Refused("bad_rank", f"{what} was handed over: only its ranks abort")
    else:
        state.settlement.cancel(reservation)


def handed_over(state: State, session: ClientSession, msg: HandedOver) -> None:
    """From here on only the ranks settle these."""
    own_rank(session, SCHEDULER)
    leases = [open_lease(state, session, msg.boot, i) for i in msg.leases]
    reservations = [open_reservation(state, session, msg.boot, i) for i in msg.reservations]
    for held in (*leases, *reservations):
        if held is not None:  # else it ended meanwhile
            held.handed_over = True
