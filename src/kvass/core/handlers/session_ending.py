"""The end of a client's session: its rows are the next to be evicted.

A session with many rows ends in several steps. The reply comes when all its rows have joined.

Law of this file: nothing stops matching. A session that goes on after its end finds what is left.
"""

from __future__ import annotations

from kvass.core.clients.registry import ClientConnection
from kvass.core.handlers import session_fetching
from kvass.core.handlers.checks import scheduler_of
from kvass.core.rows.session_end import SessionEnd
from kvass.core.state import State
from kvass.errors import Refused
from kvass.messages import EndSession, SessionEnded


def end_session(state: State, connection: ClientConnection, msg: EndSession) -> None:
    """End a client's session: from an engine's scheduler, or from a command."""
    if connection.registered is not None:
        scheduler_of(state, connection)
    if not msg.session:
        raise Refused("bad_value", "session: 0 is no session")
    tags, payer = state.followers.tags, state.tenants.payer(msg.tenant).id
    session_fetching.give_up(state, msg.session, payer)
    if tags.has_ended(msg.session, payer):
        state.send(connection.id, SessionEnded(seq=msg.seq))
        return
    tags.end(msg.session, payer, {each.tag for each in state.endings})
    state.counters["sessions_ended"] += 1
    for older in [each for each in state.endings if each.tag == msg.session]:
        _answer(state, older)  # the session has gone on since then
    state.endings.append(SessionEnd((connection.id, msg.seq), msg.session, payer))
    _go_on(state, state.endings[-1])


def end_more(state: State) -> None:
    """Continue the oldest end of a session that is not done. There must be one."""
    _go_on(state, state.endings[0])


def _go_on(state: State, end: SessionEnd) -> None:
    if end.go_on(state.rows, state.followers.tags):
        _answer(state, end)


def _answer(state: State, end: SessionEnd) -> None:
    """Answer an ``EndSession``: no more rows join."""
    state.endings.remove(end)
    state.counters["session_rows_ended"] += end.rows
    connection, seq = state.connections.get(end.asker[0]), end.asker[1]
    if connection is not None and not connection.ending:
        state.send(connection.id, SessionEnded(seq=seq, rows=end.rows))
