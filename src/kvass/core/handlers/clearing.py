"""What is said of the cache as a whole: clearing namespaces, emptying a tier, and quotas."""

from __future__ import annotations

from typing import Final

from kvass.core.clients.registry import ClientSession
from kvass.core.handlers.checks import instance_of, named_namespace
from kvass.core.pending.tier_state import Clearing, Emptying
from kvass.core.rows.row_classes import Namespace
from kvass.core.state import State
from kvass.core.tiers import epochs, promote
from kvass.errors import Refused
from kvass.messages import Clear, EmptyTier, QuotaSet, SetQuota

MOST_CLEARS: Final = 64
"""So many clears of everything may be unfinished at a time."""


def clear(state: State, session: ClientSession, msg: Clear) -> None:
    """Namespaces stop matching, some now and the others in later steps. It is answered when all
    have, and when the tiers have taken note."""
    clearing = Clearing(session.id, msg.seq, _to_clear(state, session, msg), msg.tiers)
    state.clears.append(clearing)
    _clear_some(state, clearing)
    state.allocator.reclaim()


def go_on(state: State) -> None:
    """The next namespaces of the oldest clear that is not done; there must be one."""
    _clear_some(state, state.clears[0])


def _clear_some(state: State, clearing: Clearing) -> None:
    """Clear one namespace at least, and no more after ``slice_ends`` classes and tiers' notes."""
    chosen, left, cost = list[Namespace](), clearing.left, 0
    while left and cost < state.config.slice_ends:
        ns = left.pop()
        if state.namespaces.get(ns.id) is ns:  # else it was forgotten meanwhile
            chosen.append(ns)
            cost += len(ns.classes) + len(ns.tier_epochs)
    for ns in chosen:
        ns.epoch += 1
    promote.cancel(state, chosen)
    for ns in chosen:
        epochs.clear(state, ns, clearing)
    clearing.rows += state.classes.clear(chosen)
    if left:
        return
    state.clears.remove(clearing)
    if clearing.tiers:
        epochs.empty(state, clearing, state.tiers.used)
    epochs.answer_clear(state, clearing)


def _to_clear(state: State, session: ClientSession, msg: Clear) -> list[Namespace]:
    if msg.tiers and not (msg.everything and state.tiers.used):
        raise Refused("bad_value", "tiers: are emptied with everything, and there must be some")
    if session.registered is not None:
        if msg.everything or msg.namespace:
            raise Refused("forbidden", "an engine clears its own namespace only")
        instance = instance_of(state, session)
        own = state.namespace_of(instance)
        if own is None:
            raise Refused("not_registered", f"ranks {instance.missing} are missing: clear later")
        return [own]
    if msg.everything:
        if len(state.clears) >= MOST_CLEARS:
            raise Refused("limit", f"{MOST_CLEARS} clears are under way: wait for their answers")
        return list(state.namespaces.values())
    return [named_namespace(state, msg.namespace)]


def empty_tier(state: State, session: ClientSession, msg: EmptyTier) -> None:
    """It is answered when the tier has forgotten all. L1 keeps what it has."""
    if session.registered is not None:
        raise Refused("forbidden", "an engine empties no tier")
    chosen = [tier for tier in state.tiers.used if tier.name == msg.tier]
    if not chosen:
        names = ", ".join(tier.name for tier in state.tiers.used) or "none"
        raise Refused("bad_value", f"tier {msg.tier[:80]!r}: there is no such; there are: {names}")
    numbers = {tier.number for tier in chosen}
    if any(isinstance(op, Emptying) and op.tier in numbers for op in state.tiers.ops.values()):
        raise Refused("limit", f"{msg.tier} is being emptied")
    epochs.empty(state, Clearing(session.id, msg.seq, [], True, of_l1=False), chosen)


def set_quota(state: State, session: ClientSession, msg: SetQuota) -> QuotaSet:
    """A tenant's quota is another one from now on, or none."""
    if session.registered is not None or not session.own:
        raise Refused("forbidden", "quotas are changed by the daemon's own user, not by an engine")
    if msg.remove:
        state.tenants.remove(msg.quota.tenant)
    else:
        state.tenants.set(msg.quota)
    return QuotaSet()
