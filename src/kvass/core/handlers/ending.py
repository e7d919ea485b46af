"""The end of a client's session: its rows are the next to be evicted.

Law of this file: nothing stops matching. A session that goes on after its end finds what is left.
"""

from __future__ import annotations

from kvass.core.clients.registry import ClientSession
from kvass.core.handlers.checks import scheduler_of
from kvass.core.state import State
from kvass.errors import Refused
from kvass.messages import EndSession, SessionEnded


def end_session(state: State, session: ClientSession, msg: EndSession) -> SessionEnded:
    """End a client's session: from an engine's scheduler, or from a command."""
    if session.registered is not None:
        scheduler_of(state, session)
    if not msg.session:
        raise Refused("bad_value", "session: 0 is no session")
    rows = state.rows.end_session(msg.session, state.tenants.payer(msg.tenant).id)
    state.counters["sessions_ended"] += 1
    state.counters["session_rows_ended"] += rows
    return SessionEnded(rows=rows)
