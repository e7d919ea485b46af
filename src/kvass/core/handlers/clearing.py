"""The messages of administrators: clearing namespaces or a tenant, emptying a tier, and quotas.

Each function handles one message. It returns the reply, or ``None`` if the reply comes later. It
raises ``Refused`` before it changes anything.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvass.core.clients.registry import ClientConnection
from kvass.core.handlers.checks import instance_of, named_namespace
from kvass.core.pending.tier_operations import Clearing, Emptying
from kvass.core.rows.row_classes import Namespace
from kvass.core.rows.row_table import WRITING
from kvass.core.state import State
from kvass.core.tiers import epochs, promote
from kvass.errors import Refused
from kvass.messages import Clear, ClearTenant, EmptyTier, QuotaSet, SetQuota
from kvass.types import Quota

MOST_CLEARS: Final = 64
"""The most clears of everything or of a tenant that may be unfinished at a time."""


def clear(state: State, connection: ClientConnection, msg: Clear) -> None:
    """Clear namespaces: some in this step, the others in later steps.

    The reply comes when all are cleared and the tiers have noted it.
    """
    clearing = Clearing(connection.id, msg.seq, _to_clear(state, connection, msg), msg.tiers)
    state.clears.append(clearing)
    state.classes.void(clearing.to_clear)
    _clear_some(state, clearing)
    state.reclaim()


def clear_more(state: State) -> None:
    """Continue the oldest clear that is not done. There must be one."""
    oldest = state.clears[0]
    if oldest.to_clear:
        _clear_some(state, oldest)
    else:
        _clear_some_sets(state, oldest)


def _clear_some(state: State, clearing: Clearing) -> None:
    """Clear at least one namespace of ``clearing``. Stop after ``slice_ends`` row classes and
    requests to tiers."""
    chosen, to_clear, cost = list[Namespace](), clearing.to_clear, 0
    while to_clear and cost < state.config.slice_ends:
        ns = to_clear.pop()
        if state.namespaces.get(ns.id) is ns:  # else it was dropped meanwhile
            chosen.append(ns)
            cost += len(ns.classes) + len(ns.tier_epochs)
    for ns in chosen:
        ns.epoch += 1
    promote.cancel(state, chosen)
    for ns in chosen:
        epochs.clear(state, ns, clearing)
        if ns.traffic.shadow is not None:
            ns.traffic.shadow = ns.traffic.shadow.cleared()
    asker = state.connections.get(clearing.connection)
    own = asker is not None and asker.registered is not None
    clearing.rows += state.classes.clear(chosen, "reset" if own else "cleared")
    if to_clear:
        return
    state.clears.remove(clearing)
    if clearing.tiers:
        epochs.empty(state, clearing, state.tiers.used)
    epochs.answer_clear(state, clearing)


def clear_tenant(state: State, connection: ClientConnection, msg: ClearTenant) -> None:
    """Forget the rows of L1 that a tenant pays for: some in this step, the others in later steps.

    The reply comes when all are forgotten. What engines were storing for the tenant before that is
    discarded. Tiers keep their records, so rows that a tier is loading stay.
    """
    if connection.registered is not None:
        raise Refused("forbidden", "an engine clears its own namespace only")
    tenant = state.tenants.all.get(msg.tenant)
    if tenant is None:
        raise Refused("bad_value", f"tenant {msg.tenant[:64]!r}: there is no such")
    if not (tenant.listed or tenant.taken_bytes or tenant is state.tenants.default):
        text = f"{tenant.name} has no quota, so its rows count for {state.tenants.default.name!r}"
        raise Refused("bad_value", f"tenant: {text}")
    if len(state.clears) >= MOST_CLEARS:
        raise Refused("limit", f"{MOST_CLEARS} clears are under way: wait for their answers")
    sets = np.flatnonzero(_of_tenant(state, tenant.id))
    clearing = Clearing(connection.id, msg.seq, [], False, tenant=tenant.id, sets=sets)
    state.clears.append(clearing)
    state.classes.table.void(sets)
    _clear_some_sets(state, clearing)


def _of_tenant(state: State, tenant: int) -> npt.NDArray[np.bool_]:
    """By extent set, whether the tenant pays for it."""
    sets = state.classes.sets
    theirs: npt.NDArray[np.bool_] = (sets.owner >= 0) & (sets.tenant == tenant)
    return theirs


def _clear_some_sets(state: State, clearing: Clearing) -> None:
    """Clear extent sets of ``slice_slots`` slots, or one set. A set may have been given back
    meanwhile."""
    sets = clearing.sets[_of_tenant(state, clearing.tenant)[clearing.sets]]
    upto = np.cumsum(state.classes.sets.slots[sets])
    count = max(1, int(np.searchsorted(upto, state.config.slice_slots, side="right")))
    chosen, clearing.sets = sets[:count], sets[count:]
    rows = state.classes.sets.rows_of(chosen)
    writing = rows[state.rows.table.state[rows] == WRITING]
    for reservation in np.unique(state.rows.table.loader[writing]).tolist():
        state.settlement.discard(state.reservations.all[reservation], "cleared")
    clearing.rows += state.allocator.clear_sets(chosen)
    if not len(clearing.sets):
        state.clears.remove(clearing)
        epochs.answer_clear(state, clearing)


def _to_clear(state: State, connection: ClientConnection, msg: Clear) -> list[Namespace]:
    if msg.tiers and not (msg.everything and state.tiers.used):
        raise Refused("bad_value", "tiers: are emptied with everything, and there must be some")
    if connection.registered is not None:
        if msg.everything or msg.namespace:
            raise Refused("forbidden", "an engine clears its own namespace only")
        instance = instance_of(state, connection)
        own = state.namespace_of(instance)
        if own is None:
            raise Refused("not_registered", f"ranks {instance.missing} are missing: clear later")
        return [own]
    if msg.everything:
        if len(state.clears) >= MOST_CLEARS:
            raise Refused("limit", f"{MOST_CLEARS} clears are under way: wait for their answers")
        return list(state.namespaces.values())
    return [named_namespace(state, msg.namespace)]


def empty_tier(state: State, connection: ClientConnection, msg: EmptyTier) -> None:
    """Delete all records of a tier. L1 keeps its rows. The reply comes when the tier is empty."""
    if connection.registered is not None:
        raise Refused("forbidden", "an engine empties no tier")
    chosen = [tier for tier in state.tiers.used if tier.name == msg.tier]
    if not chosen:
        names = ", ".join(tier.name for tier in state.tiers.used) or "none"
        raise Refused("bad_value", f"tier {msg.tier[:80]!r}: there is no such; there are: {names}")
    numbers = {tier.number for tier in chosen}
    if any(isinstance(op, Emptying) and op.tier in numbers for op in state.tiers.ops.values()):
        raise Refused("limit", f"{msg.tier} is being emptied")
    epochs.empty(state, Clearing(connection.id, msg.seq, [], True, of_l1=False), chosen)


def set_quota(state: State, connection: ClientConnection, msg: SetQuota) -> QuotaSet:
    if connection.registered is not None or not connection.own:
        raise Refused("forbidden", "quotas are changed by the daemon's own user, not by an engine")
    if msg.remove:
        state.tenants.remove(msg.quota.tenant)
    else:
        state.tenants.set(msg.quota)
    state.followers.kept.trim()
    return QuotaSet()


def replace_quotas(state: State, quotas: tuple[Quota, ...]) -> None:
    """Replace all quotas by those of the daemon's configuration."""
    state.tenants.replace(quotas)
    state.followers.kept.trim()
