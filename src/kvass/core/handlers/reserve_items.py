"""The items of a ``Reserve``: their checks, and how many of them one step decides.

No function here changes anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from kvass.core.handlers.checks import check_request, most_keys, split_keys
from kvass.core.rows.row_class import RowClass
from kvass.core.rows.row_classes import Namespace
from kvass.core.state import State
from kvass.errors import Refused
from kvass.messages import RequestContext, ReserveItem
from kvass.types import U64Array

COST_OF_AN_ITEM: Final = 256
"""The cost of an item, without its chunks. The unit is the cost of granting one chunk."""
COST_A_STEP: Final = 6 * COST_OF_AN_ITEM
"""The most that the items of one step cost. Granting a chunk costs 1. Looking up eight chunks costs
1, too."""


class Item(NamedTuple):
    """A ``ReserveItem`` that was checked.

    ``classes``: the row classes of the groups for which rows are requested. ``prints``: the
    fingerprints of each chunk's blocks from chunk ``first`` on, if the blocks are known. ``tail``:
    how many blocks the last chunk has if it is a tail, whose key is the hash of its last block; 0:
    it is a whole chunk. ``context``: of the item's request.
    """

    request: str
    first: int
    keys: U64Array
    classes: list[RowClass]
    context: RequestContext
    prints: U64Array | None = None
    tail: int = 0


def checked(state: State, ns: Namespace, item: ReserveItem, width: int) -> Item | Refused:
    """``check_item``, whose ``Refused`` is returned: the other items may be granted."""
    try:
        return check_item(state, ns, item, width)
    except Refused as refused:
        return refused


def check_item(state: State, ns: Namespace, item: ReserveItem, width: int) -> Item:
    """Check one item of a ``Reserve``. ``width``: bytes per digest. Raises ``Refused``."""
    check_request(item.request, state.config.limits)
    keys = split_keys(item.digests, width, item.first, state.config.limits)
    groups = len(ns.classes)
    if not 0 < item.groups < 1 << groups:
        raise Refused("bad_value", f"groups: mask {item.groups} does not fit {groups} groups")
    classes = [c for g, c in enumerate(ns.classes) if item.groups >> g & 1]
    most = most_keys(state, ns)
    if item.first > most:
        return Item(item.request, 0, keys[:0], classes, item)
    if not item.blocks or not ns.chunk_blocks:
        return Item(item.request, item.first, keys[:most], classes, item)
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
    return Item(item.request, item.first, keys, classes, item, prints, tail)


def items_of_a_step(items: Sequence[ReserveItem], sizes: list[int], groups: int) -> int:
    """How many of the items one step checks and grants. ``sizes``: how many keys each has."""
    cost = 0
    for number, (item, size) in enumerate(zip(items, sizes, strict=True)):
        cost += COST_OF_AN_ITEM + (max(0, size - item.first) + size // 8) * groups
        if cost > COST_A_STEP:
            return max(1, number)
    return len(items)


def items_of_one_payer(state: State, items: Sequence[ReserveItem]) -> int:
    """How many of the first items have the same payer. A step makes room for one payer only."""
    if not state.tenants.divided or not items:
        return len(items)
    payers = [state.tenants.payer(item.tenant) for item in items]
    return next((n for n, payer in enumerate(payers) if payer is not payers[0]), len(items))
