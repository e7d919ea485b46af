"""What is said of the cache as a whole: clearing a namespace or all of them, and quotas."""

from __future__ import annotations

from kvass.core import epochs, promote
from kvass.core.checks import instance_of, named_namespace
from kvass.core.registry import ClientSession
from kvass.core.row_store import Namespace
from kvass.core.state import State
from kvass.core.tier_state import Clearing
from kvass.errors import Refused
from kvass.messages import Clear, Cleared, QuotaSet, SetQuota


def clear(state: State, session: ClientSession, msg: Clear) -> Cleared | None:
    """Namespaces stop matching: their epoch moves on.

    ``None``: it is answered when the tiers have taken note.
    """
    chosen = _to_clear(state, session, msg)
    clearing = Clearing(session=session.id, seq=msg.seq, rows=0)
    for ns in chosen:
        ns.epoch += 1
    promote.cancel(state, chosen)
    for ns in chosen:
        epochs.clear(state, ns, clearing)
    clearing.rows = state.store.clear(chosen)
    state.store.reclaim()
    if msg.tiers:
        epochs.empty(state, clearing)
    return None if clearing.awaits else Cleared(rows=clearing.rows)


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
        return list(state.namespaces.values())
    return [named_namespace(state, msg.namespace)]


def set_quota(state: State, session: ClientSession, msg: SetQuota) -> QuotaSet:
    """A tenant's quota is another one from now on, or none."""
    if session.registered is not None or not session.own:
        raise Refused("forbidden", "quotas are changed by the daemon's own user, not by an engine")
    if msg.remove:
        state.tenants.remove(msg.quota.tenant)
    else:
        state.tenants.set(msg.quota)
    return QuotaSet()
