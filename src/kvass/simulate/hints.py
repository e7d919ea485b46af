"""Which requests of a trace say that their session ends with them (``kvass.ttl: 0``).

A trace does not say which requests are of one session. A request continues a session if its prompt
begins with the whole pieces of the session's last prompt; with several, it is that with most
pieces. A session has ended if the last piece of its last prompt never comes again.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np

from kvass.simulate.traces import Trace, TraceRequest
from kvass.types import I64Array


def with_ends(trace: Trace, share: float, wrong: float, seed: int) -> Trace:
    """The trace with sessions, of which ``share`` say that they end. Of these hints the share
    ``wrong`` comes from requests whose session goes on, as far as there are enough of them. With
    ``share`` 0 the trace is as it was."""
    if not share:
        return trace
    random, sessions = Random(seed), sessions_of(trace)
    says = {session for session in range(1, int(sessions.max()) + 1) if random.random() < share}
    last = {piece: i for i, r in enumerate(trace.requests) for piece in r.pieces.tolist()}
    over = [i for i, r in enumerate(trace.requests) if _ends(r, last, i) and sessions[i] in says]
    on = [i for i, r in enumerate(trace.requests) if len(r.pieces) and not _ends(r, last, i)]
    count = len(over) if wrong >= 1 else round(len(over) * wrong / (1 - wrong))
    right = [] if wrong >= 1 else over
    hinted = {*right, *random.sample(on, min(count, len(on)))}
    requests = [
        replace(r, session=int(sessions[i]), ends=i in hinted) for i, r in enumerate(trace.requests)
    ]
    return replace(trace, requests=requests)


def sessions_of(trace: Trace) -> I64Array:
    """By request, the number of its session, from 1 on."""
    ends_with, sessions, made = dict[int, int](), [], 0
    for request in trace.requests:
        pieces = request.pieces.tolist()
        before = (ends_with.pop(piece) for piece in reversed(pieces) if piece in ends_with)
        session = next(before, 0)
        if not session:
            made = session = made + 1
        if pieces:
            ends_with[pieces[-1]] = session
        sessions.append(session)
    return np.array(sessions, np.int64)


def _ends(request: TraceRequest, last: dict[int, int], number: int) -> bool:
    """Whether the last piece of a request's prompt never comes again."""
    return len(request.pieces) > 0 and last[int(request.pieces[-1])] == number
