"""The messages of explanations: what engines know of lookups, and the question for all of it.

Each function handles one message. It raises ``Refused`` before it changes anything.
"""

from __future__ import annotations

from typing import Final

from kvass.core.clients.lookup_log import TEXT, LookupEntry
from kvass.core.clients.registry import ClientConnection
from kvass.core.handlers.checks import check_boot, check_request, is_request, scheduler_of
from kvass.core.state import State
from kvass.errors import Refused
from kvass.messages import MOST_EXPLAINED, Explain, Explained, LookupNotes

_WHY: Final = 64
"""The most characters of a reason."""


def lookup_notes(state: State, connection: ClientConnection, msg: LookupNotes) -> None:
    """Add an engine's notes to its log. A note of a request that the daemon has answered just
    before, such as of a load that failed, changes the entry of that answer. A note that is refused
    is left out. Only if all are, the message is refused."""
    instance = scheduler_of(state, connection)
    check_boot(state, msg.boot)
    notes = [each for each in msg.notes if is_request(each.request, state.config.limits)]
    if not notes and msg.notes:
        check_request(msg.notes[0].request, state.config.limits)
    state.counters["refused_bad_value"] += len(msg.notes) - len(notes)
    log = state.log.of(instance)
    for each in notes:
        when, why = min(each.when_s, state.now), each.why[:_WHY]
        if why == "load_failed_here" and log.load_failed(each.request, each.detail[:TEXT]):
            continue
        log.add(
            LookupEntry(
                request=each.request,
                when=when,
                prompt_tokens=each.prompt_tokens,
                local_tokens=each.local_tokens,
                end_token=each.local_tokens,
                why=why,
                detail=each.detail[:TEXT],
            )
        )


def explain(state: State, connection: ClientConnection, msg: Explain) -> Explained:
    """The last lookups that the message asks for, with the reasons."""
    if not 1 <= msg.limit <= MOST_EXPLAINED:
        raise Refused("bad_value", f"limit: {msg.limit} is not in 1..{MOST_EXPLAINED}")
    found = state.log.fields(msg.engine, msg.request, msg.limit, state.now)
    return Explained(lookups=tuple(found))
