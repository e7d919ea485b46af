"""The messages of a store: reserve, commit, abort and ``HandedOver``.

Each function handles one message. It returns the reply, or ``None`` if there is none. It raises
``Refused`` before it changes anything.
"""

from __future__ import annotations

from kvass.core import results
from kvass.core.clients.registry import ClientConnection
from kvass.core.handlers import granting, session_fetching
from kvass.core.handlers.checks import open_lease, open_reservation, own_rank, scheduler_of
from kvass.core.handlers.reserve_items import checked, items_of_a_step, items_of_one_payer
from kvass.core.state import State
from kvass.core.tiers import flush
from kvass.errors import Refused
from kvass.messages import Abort, Commit, Grant, Granted, HandedOver, Reserve
from kvass.types import SCHEDULER


def reserve(state: State, connection: ClientConnection, msg: Reserve) -> Granted:
    """Grant slots for the chunks of one scheduler step that have no row yet. An item that is
    refused changes nothing, for the other items neither."""
    instance = scheduler_of(state, connection)
    if state.leaving:
        raise Refused("shutting_down", "the daemon stops: reserve from the next one")
    ns = state.namespace_of(instance)
    if ns is None:  # nothing was decided: the engine reserves again
        raise Refused("not_registered", f"ranks {instance.missing} are missing: reserve later")
    if not 8 <= msg.width <= 32:
        raise Refused("bad_value", f"width: {msg.width} is not in 8..32")
    sizes = [len(item.digests) // msg.width for item in msg.items]
    if sum(sizes) > state.config.limits.keys_per_message:
        raise Refused("limit", f"at most {state.config.limits.keys_per_message} keys a message")
    now = min(
        items_of_a_step(msg.items, sizes, len(ns.classes)), items_of_one_payer(state, msg.items)
    )
    items = [checked(state, ns, item, msg.width) for item in msg.items[:now]]
    protect = state.rows.table.clock
    used = [  # before a grant evicts rows
        [] if isinstance(item, Refused) else granting.touch(state, ns, item) for item in items
    ]
    grants = list[Grant]()
    for item, found in zip(items, used, strict=True):
        if isinstance(item, Refused):
            state.counters[f"refused_{item.code}"] += 1
            grants.append(Grant(error=item.text))
            continue
        if grants:  # an item before it may have been granted some of the same rows
            found = granting.find(ns, item)
        grants.append(granting.grant(state, instance, ns, item, protect, found))
        whole = item.keys[: len(item.keys) - (item.tail > 0)]  # no tier is offered a tail
        session_fetching.remember(state, ns, item.context, whole)
        grants[-1].kept = state.keep(ns, found, item.context)
    grants += [Grant(later=item.first) for item in msg.items[now:]]
    flush.queue_next_victims(state)
    return Granted(
        boot=state.config.boot,
        given_s=state.now,
        deadline_s=state.now + state.config.timing.reserve_s,
        grants=grants,
    )


def commit(state: State, connection: ClientConnection, msg: Commit) -> None:
    """A rank has written its shard of every row of a reservation."""
    reservation = open_reservation(state, connection, msg.boot, msg.reservation)
    rank = own_rank(connection, msg.rank)
    if reservation is not None and rank in reservation.owing:  # else a second commit, or it ended
        state.settlement.commit(reservation, rank)


def abort(state: State, connection: ClientConnection, msg: Abort) -> None:
    """A rank will not write, or the scheduler gives back a reservation before handing it over."""
    reservation = open_reservation(state, connection, msg.boot, msg.reservation)
    rank = own_rank(connection, msg.rank)
    if reservation is None:
        return
    if rank != SCHEDULER:
        state.settlement.abort(reservation, rank)
    elif reservation.handed_over:
        what = f"reservation {msg.reservation}"
        raise Refused("bad_rank", f"{what} was handed over: only its ranks abort")
    else:
        state.settlement.cancel(reservation)


def handed_over(state: State, connection: ClientConnection, msg: HandedOver) -> None:
    """From now on only the ranks can end these leases and reservations. Count the results."""
    own_rank(connection, SCHEDULER)
    instance = scheduler_of(state, connection)
    leases = [open_lease(state, connection, msg.boot, i) for i in msg.leases]
    reservations = [open_reservation(state, connection, msg.boot, i) for i in msg.reservations]
    for held in (*leases, *reservations):
        if held is not None:  # else it ended meanwhile
            held.handed_over = True
    if msg.results or msg.prefill_tokens_s:
        results.reported(state, instance, msg.results, msg.prefill_tokens_s)
