"""``Reserve``: rows for what a scheduler step completes. It is checked, then granted by items.

Law of this file: a ``Reserve`` that is refused changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from kvass.core.clients.registry import ClientSession
from kvass.core.handlers.checks import check_request, most_keys, scheduler_of, split_keys
from kvass.core.handlers.granting import Item, find, grant, touch
from kvass.core.rows.row_classes import Namespace
from kvass.core.state import State
from kvass.core.tiers import flush
from kvass.errors import Refused
from kvass.messages import Grant, Granted, Reserve, ReserveItem

COST_OF_AN_ITEM: Final = 256
COST_A_STEP: Final = 6 * COST_OF_AN_ITEM
"""What one step does for a ``Reserve``, in chunks that it grants: an item takes as long as 256 of
them, and to find eight that are there as long as c."""


def reserve(state: State, session: ClientSession, msg: Reserve) -> Granted:
    """Slots for the chunks of one scheduler step that nobody has yet."""
    instance = scheduler_of(state, session)
    ns = state.namespace_of(instance)
    if ns is None:  # no decision about any key: it is asked again
        raise Refused("not_registered", f"ranks {instance.missing} are missing: reserve later")
    sizes = [len(item.digests) // max(msg.width, 1) for item in msg.items]
    if sum(sizes) > state.config.limits.keys_per_message:
        raise Refused("limit", f"at most {state.config.limits.keys_per_message} keys a message")
    now = min(_items_now(msg.items, sizes, len(ns.classes)), _items_of_one_payer(state, msg.items))
    items = [_checked(state, ns, item, msg.width) for item in msg.items[:now]]
    protect = state.rows.table.clock
    used = [touch(state, ns, item) for item in items]  # before any makes room for itself
    grants = list[Grant]()
    for item, found in zip(items, used, strict=True):
        if grants:  # an item before may have been granted its rows
            found = find(ns, item)
        grants.append(grant(state, instance, ns, item, protect, found))
    grants += [Grant(later=item.first) for item in msg.items[now:]]
    flush.queue_next_victims(state)
    return Granted(
        boot=state.config.boot,
        given_s=state.now,
        deadline_s=state.now + state.config.timing.reserve_s,
        grants=grants,
    )


def _checked(state: State, ns: Namespace, item: ReserveItem, width: int) -> Item:
    check_request(item.request, state.config.limits)
    keys = split_keys(item.digests, width, item.first, state.config.limits)
    groups = len(ns.classes)
    if not 0 < item.groups < 1 << groups:
        raise Refused("bad_value", f"groups: mask {item.groups} does not fit {groups} groups")
    classes = [c for g, c in enumerate(ns.classes) if item.groups >> g & 1]
    most = most_keys(state, ns)
    if item.first > most:
        return Item(item.request, 0, keys[:0], classes, item.tenant)
    if not item.blocks or not ns.chunk_blocks:
        return Item(item.request, item.first, keys[:most], classes, item.tenant)
    blocks = split_keys(item.blocks, width, 0, state.config.limits)
    chunks, tail = divmod(len(blocks), ns.chunk_blocks)
    if chunks != len(keys) - item.first:
        text = f"{len(blocks)} hashes for {len(keys) - item.first} chunks and the part of one"
        raise Refused("bad_value", f"blocks: {text}; a chunk has {ns.chunk_blocks}")
    prints = np.zeros((chunks + (tail > 0)) * ns.chunk_blocks, np.uint64)
    prints[: len(blocks)] = state.classes.prints(blocks)
    prints = prints.reshape(-1, ns.chunk_blocks)[:, :-1]
    if tail:
        keys = np.concatenate([keys, blocks[-1:]])
    if len(keys) > most:
        keys, tail = keys[:most], 0
    return Item(item.request, item.first, keys, classes, item.tenant, prints, tail)


def _items_now(items: Sequence[ReserveItem], sizes: list[int], groups: int) -> int:
    """How many of the items, of so many keys each, one step checks and carries out."""
    cost = 0
    for number, (item, size) in enumerate(zip(items, sizes, strict=True)):
        cost += COST_OF_AN_ITEM + (max(0, size - item.first) + size // 8) * groups
        if cost > COST_A_STEP:
            return max(1, number)
    return len(items)


def _items_of_one_payer(state: State, items: Sequence[ReserveItem]) -> int:
    """How many of the items have the payer of the first: a step makes room for one only."""
    if not state.tenants.divided or not items:
        return len(items)
    payers = [state.tenants.payer(item.tenant) for item in items]
    return next((n for n, payer in enumerate(payers) if payer is not payers[0]), len(items))
