"""Sessions that come back: their rows are loaded from tiers before their next request.

Law of this file: a fetch is a prefetch that nobody waits for. So lookups come first
(``tiers/ahead.py``), it loads into a part of L1 only and evicts nothing that was used just now
(``tiers/plan.py``), and ``MOST_OPEN`` go on at a time (law 12).

``clients/session_prompts.py`` knows the prompts, and when they are due.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvass.core.clients.registry import ClientConnection
from kvass.core.clients.session_prompts import SOON_S, SessionPrompt
from kvass.core.handlers.checks import most_keys, scheduler_of
from kvass.core.matching.prefix import PrefixView
from kvass.core.pending.promotion import Asker, Promotion, PromotionState, promotion_of
from kvass.core.pending.tier_operations import Looking
from kvass.core.rows.index import ABSENT, digests_of
from kvass.core.rows.row_classes import Namespace
from kvass.core.rows.row_table import LOADING, READY
from kvass.core.state import NOBODY, State
from kvass.core.tiers import epochs, flush, presence, promote
from kvass.core.tiers.plan import AHEAD_SHARE
from kvass.errors import Refused
from kvass.messages import AskSession, RequestContext, SessionIs
from kvass.types import U64Array

MOST_OPEN: Final = 32
"""The most fetches that go on at a time. What comes due meanwhile waits."""
AGAIN_S: Final = 0.25
"""How long a part of a prompt waits for its turn, and twice as long each time that none came."""
REST_S: Final = 0.01
"""If one finds no room, the next one looks so much later: many that wait take little time."""
LOOK_S: Final = 1.0
"""How long it waits for the room that it needs before it is looked up again. Then the next payer
has a turn, whose fetch may need less room. No more often: else one with many small fetches would
take all the room before there is enough for a big one."""
LET_GO_S: Final = 0.05
"""How long after a session was last heard of its rows are let go, and twice as long each time that
they are not in the tiers yet."""
LET_GO_ROWS: Final = 4096
"""So many rows of a prompt are let go at most, of its last chunks: 2 ms of work."""
FETCH_S: Final = 60.0
"""How long after it is due a fetch is given up."""
EARLY: Final = 0.1
"""A fetch begins so much of the pause before its end, and as long as its load takes before that."""
LEAST_EARLY_S: Final = 0.5
MOST_EARLY: Final = 0.5
"""But no more of the pause before its end than this."""
LONGEST_S: Final = 86_400.0
"""Longer pauses become this."""
_OWNER: Final = "fetches of sessions"


def remember(state: State, ns: Namespace, context: RequestContext, keys: U64Array) -> None:
    """A request of a client's session has these chunks. If it says so, they are fetched before the
    session's next one."""
    if not context.session or not len(keys):
        return
    keys, tenant = keys[: most_keys(state, ns)], context.tenant
    payer = state.tenants.payer(tenant).id
    prompt = state.sessions.remember(context.session, ns.id, payer, tenant, keys, ns.epoch)
    prompt.since_s = min(prompt.since_s, state.now)
    over = state.followers.tags.has_ended(context.session, payer)
    if context.then_s > 0 and state.tiers.used and not over:
        pause = min(context.then_s, LONGEST_S)
        size = _size(ns, len(keys))
        load_s = max(tier.speed.measured_s(size) for tier in state.tiers.used)
        early_s = max(LEAST_EARLY_S, pause * EARLY) + load_s
        prompt.early_s = min(early_s, pause * MOST_EARLY)
        prompt.gap_s = LET_GO_S
        prompt.fetch_s = state.now + pause - prompt.early_s
        _look_again(state, prompt)


def next_due(state: State) -> None:
    """Do what is due of the session that has been due longest. There must be one."""
    prompt = state.sessions.take_due(state.now)
    assert prompt is not None, "no session is due"
    if prompt.fetch_s <= state.now:
        _fetch(state, prompt)
    elif _let_go(state, prompt):
        state.sessions.wake_at(prompt, prompt.fetch_s)
    else:
        _look_again(state, prompt)


def _look_again(state: State, prompt: SessionPrompt) -> None:
    """Look a little later whether the rows of a prompt can go."""
    state.sessions.wake_at(prompt, min(state.now + prompt.gap_s, prompt.fetch_s))
    prompt.gap_s *= 2


def _let_go(state: State, prompt: SessionPrompt) -> bool:
    """Have the rows that a session alone uses be evicted first, if they would be evicted anyway
    before they are fetched. False: not yet, because some are not in the tiers."""
    ns = _namespace_of(state, prompt)
    if ns is None or not epochs.in_tiers(state, ns):
        return True
    last = prompt.keys[-(LET_GO_ROWS // len(ns.classes)) :]
    found = [c.index.find(last) for c in ns.classes]
    rows, table, follow = np.unique(np.concatenate(found)), state.rows.table, state.followers
    rows = rows[rows != ABSENT]
    if (table.state[rows] < READY).any():
        return False
    prompt.ready_s = min(prompt.ready_s, state.now)
    if not all(flush.has_all(tier, prompt.since_s, prompt.ready_s) for tier in state.tiers.used):
        return False
    mine = state.rows.classes.sets.tenant[table.set_of[rows]] == prompt.payer
    mine &= table.offered[rows] & (follow.tags.of(rows) == prompt.tag) & ~follow.kept.of(rows)
    for owner, theirs in state.rows.by_class(rows[mine]):
        assert owner is not None, "rows of a class that was removed"
        oldest = table.stamp[owner.order.oldest(1, table.clock)].tolist()
        if sum(map(state.rows.uses.age, oldest)) < prompt.fetch_s - state.now:
            owner.order.evict_first(theirs)
    return True


def give_up(state: State, tag: int, payer: int) -> None:
    """Fetch nothing more of a session."""
    for prompt in state.sessions.of(tag, payer):
        state.sessions.wake_at(prompt, None)
        promote.stop(state, _OWNER, _name(prompt))


def ask_session(state: State, connection: ClientConnection, msg: AskSession) -> SessionIs | None:
    """Say where the rows of a session are, or fetch them. ``None``: a tier was asked. The reply
    comes later."""
    if connection.registered is not None:
        scheduler_of(state, connection)
    if not msg.session:
        raise Refused("bad_value", "session: 0 is no session")
    payer = state.tenants.payer(msg.tenant).id
    every = state.sessions.of(msg.session, payer)
    prompts = [each for each in every if _namespace_of(state, each) is not None]
    if not prompts:
        return SessionIs()
    if msg.fetch:
        if len(_fetches(state)) >= MOST_OPEN:
            raise Refused("limit", f"{MOST_OPEN} fetches go on: ask later")
        for prompt in prompts:
            prompt.had, prompt.until, prompt.early_s, prompt.fetch_s = -1, 0.0, SOON_S, state.now
            prompt.looks_s = 0.0
            _fetch(state, prompt)
    ns = state.namespaces[prompts[-1].namespace]
    keys = prompts[-1].keys[: most_keys(state, ns)]
    view = PrefixView(state.rows, ns, keys, 0)
    there, coming = view.there(), view.there(LOADING)
    sizes = [c.spec.row_bytes for c in ns.classes]
    l1_bytes = sum(int(t.sum()) * size for t, size in zip(there, sizes, strict=True))
    either_bytes = sum(int(t.sum()) * size for t, size in zip(coming, sizes, strict=True))
    reply = SessionIs(
        model=ns.model,
        chunk_tokens=ns.chunk_tokens,
        chunks=len(keys),
        hit_chunks=view.longest(there),
        l1_bytes=l1_bytes,
        loading_bytes=either_bytes - l1_bytes,
        fetching=sum(p.request == _name(prompts[-1]) for p in _fetches(state)),
    )
    if msg.keys:
        reply.namespace, reply.digests = ns.digest, digests_of(keys, 32)
        if not ns.private:
            reply.engine = state.layouts.engine(ns.terms, ns.model, ns.ranks)
    looking = Looking(-1, connection.id, msg.seq, ns, ns.epoch, ns.classes, keys, there, reply)
    return None if not msg.fetch and presence.ask(state, looking) else reply


def _fetch(state: State, prompt: SessionPrompt) -> None:
    """Load from tiers a part of what L1 lacks of a prompt: as much as a prefetch may load. The next
    part is due a little later, and so is one for which there is no room yet."""
    ns = _namespace_of(state, prompt)
    if ns is None or state.stopping or not epochs.in_tiers(state, ns):
        return
    if not prompt.until:
        prompt.until, prompt.gap_s = prompt.fetch_s + FETCH_S, AGAIN_S
    if prompt.until <= state.now:
        return
    every, most = _fetches(state), int(state.config.arena_bytes * AHEAD_SHARE)
    asking = [p for p in every if p.state is not PromotionState.LOADING]
    soon = sum(_size(p.namespace, len(p.keys) - p.first) for p in asking)
    room = most - state.loading_bytes - soon
    turn = len(every) < MOST_OPEN and room > 0
    looks = state.now >= prompt.looks_s or (turn and room >= prompt.needs_bytes)
    if looks:
        view = PrefixView(state.rows, ns, prompt.keys[: most_keys(state, ns)], 0)
        chunks = view.longest(view.there())
        if not (lacks := _size(ns, len(view.keys) - chunks)):
            view.use(chunks)  # else what was let go would still go first
            return
        prompt.needs_bytes = min(lacks, most // 2)  # it looks again when there is so much
        prompt.looks_s = state.now + LOOK_S
    if not turn or prompt.needs_bytes > room:
        state.sessions.rests_until = state.now + REST_S
        state.sessions.wake_at(prompt, prompt.fetch_s)  # before those that are to be fetched later
        if turn and looks:
            state.sessions.had_turn(prompt.payer, state.now)
        return
    if not any(p.request == _name(prompt) and p.namespace is ns for p in every):
        _load(state, prompt, view, chunks)
    if (again := state.now + prompt.gap_s) < prompt.until:
        state.sessions.wake_at(prompt, again)


def _load(state: State, prompt: SessionPrompt, view: PrefixView, chunks: int) -> None:
    """Begin to load the next part of a prompt, of which L1 has ``chunks`` chunks."""
    state.counters["session_fetches"] += prompt.had < 0
    prompt.gap_s = AGAIN_S if chunks > prompt.had else 2 * prompt.gap_s
    prompt.had, prompt.looks_s = chunks, 0.0
    state.sessions.had_turn(prompt.payer, state.now)
    view.use(chunks)  # so that none of them is evicted for the load; they are not pinned for it
    rest = PrefixView(state.rows, view.ns, view.keys, chunks)
    asker = Asker(NOBODY, 0, _OWNER, _name(prompt))
    number, span = next(state.promotions.numbers), (state.now, prompt.until)
    context = RequestContext(tenant=prompt.tenant, session=prompt.tag)
    promotion = promotion_of(number, asker, rest, span, (), context)
    promotion.soon_s = prompt.early_s
    promote.begin(state, promotion, writing=False)


def _namespace_of(state: State, prompt: SessionPrompt) -> Namespace | None:
    """The namespace of a prompt; None: it is not there, or was cleared since."""
    ns = state.namespaces.get(prompt.namespace)
    return ns if ns is not None and ns.epoch == prompt.epoch else None


def _size(ns: Namespace, chunks: int) -> int:
    """The bytes of ``chunks`` chunks that have a row in each group."""
    return chunks * sum(c.spec.row_bytes for c in ns.classes)


def _fetches(state: State) -> list[Promotion]:
    return [*state.promotions.of(_OWNER).values()]


def _name(prompt: SessionPrompt) -> str:
    return f"{prompt.payer} {prompt.tag:08x}"
