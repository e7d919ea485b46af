"""The client of commands and web pages: status, explain, clears, prefetch, quotas and so on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, Final, Self

from kvass.client.endpoint import Endpoint
from kvass.client.explanation import is_request, sentence, users_id
from kvass.errors import Incompatible, Refused, UnknownName, UsageError
from kvass.messages import (
    CLEAR_TENANT,
    END_SESSION,
    MOST_EXPLAINED,
    SESSIONS,
    AskSession,
    Clear,
    Cleared,
    ClearTenant,
    EmptyTier,
    EndSession,
    Explain,
    Explained,
    Prefetch,
    Prefetched,
    SessionEnded,
    SessionIs,
    SetQuota,
    Status,
    StatusReply,
)
from kvass.types import (
    DEFAULT_TENANT,
    MOST_SECONDS,
    Quota,
    is_tenant_name,
    printable,
    session_tag,
)

_QUERY: Final = 128
"""The most characters of a name that ``Explain`` looks for. Any short name keeps more of it."""


def bounded(value: float) -> float:
    """``value`` limited to what a message may carry (``Seconds``): negatives and NaN become 0."""
    return min(max(0.0, value), MOST_SECONDS)  # in this order: ``max`` keeps its first for a NaN


def unknown(kind: str, name: str, known: Iterable[str]) -> UnknownName:
    """The error for a ``name`` that the daemon does not know. It has the nearest ``known`` ones."""
    names = sorted(set(known))
    near = get_close_matches(name, names, 3, 0.4) or names[:3]
    hint = f"the nearest: {', '.join(near)}" if near else "it knows none"
    return UnknownName(f"{kind} {name[:80]!r}: the daemon knows no such {kind}; {hint}")


class Client(Endpoint):
    """A client without a registration. ``Client(path).status()`` is a complete use of it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def status(self, timeout_s: float = 5.0, terms_of: Sequence[str] = ()) -> dict[str, Any]:
        """The fields of ``kvass status``. ``terms_of``: the digests, in hex, of namespaces that
        have all their fields, as ``terms``. Raises what ``call`` raises."""
        digests = tuple(map(bytes.fromhex, terms_of))
        reply = self.call(Status(terms_of=digests), timeout_s)
        assert isinstance(reply, StatusReply)
        return reply.fields

    def explain(
        self, engine: str = "", request: str = "", limit: int = 20, timeout_s: float = 5.0
    ) -> list[dict[str, Any]]:
        """The last ``limit`` lookups, oldest first, and why they did not match more.

        ``engine``: the beginning of an instance's id, or a part of a model's name. ``request``: the
        id of a request. docs/explain.md has the fields. Raises what ``call`` raises;
        ``Incompatible`` if the daemon is too old.
        """
        if "explain" not in self.connect(timeout_s).features:
            raise Incompatible("the daemon is older than this command: restart it")
        most = MOST_EXPLAINED if request else limit
        message = Explain(engine=printable(engine[:_QUERY]), request=printable(request[:_QUERY]))
        message.limit = most
        reply = self.call(message, timeout_s)
        assert isinstance(reply, Explained)
        found = [
            {**one, "request": users_id(one["request"]), "text": sentence(one)}
            for one in reply.lookups
            if not request or is_request(one["request"], request)
        ]
        return found[-limit:]

    def clear(
        self,
        namespace: bytes = b"",
        *,
        everything: bool = False,
        tiers: bool = False,
        timeout_s: float = 30.0,
    ) -> int:
        """Forget rows, and with ``tiers`` all records too. Returns how many rows stopped matching.

        Raises what ``call`` raises; ``Refused`` (``tier_down``) if a tier could not note it.
        """
        message = Clear(namespace=namespace, everything=everything, tiers=tiers)
        reply = self.call(message, timeout_s)
        assert isinstance(reply, Cleared)
        return reply.rows

    def clear_model(self, model: str, *, timeout_s: float = 30.0) -> int:
        """Clear all namespaces of a model, named as in ``kvass status``. Returns how many rows
        stopped matching.

        Raises what ``clear`` raises; ``UnknownName`` if the daemon knows no such model.
        """
        namespaces = self.status()["namespaces"]
        named = [ns for ns in namespaces if (ns["model"] or "?") == model]
        if not named:
            raise unknown("model", model, (ns["model"] or "?" for ns in namespaces))
        return sum(self._clear_if_known(bytes.fromhex(n["namespace"]), timeout_s) for n in named)

    def _clear_if_known(self, namespace: bytes, timeout_s: float) -> int:
        """Clear a namespace; 0 if the daemon has dropped it meanwhile, with its rows."""
        try:
            return self.clear(namespace, timeout_s=timeout_s)
        except Refused as refused:
            if refused.code != "bad_value":
                raise
            return 0

    def clear_tenant(self, tenant: str, *, timeout_s: float = 30.0) -> int:
        """Forget the rows of L1 that a tenant pays for. Returns how many rows stopped matching.
        Tiers keep the tenant's records.

        Raises what ``call`` raises; ``UnknownName`` if the daemon knows no such tenant;
        ``Refused`` if the tenant's rows count for the default tenant; ``Incompatible`` if the
        daemon is older than this message.
        """
        self._require(CLEAR_TENANT, "clear a tenant; nothing was cleared")
        tenants = [each["tenant"] for each in self.status()["tenants"]]
        if tenant not in tenants:
            raise unknown("tenant", tenant, tenants)
        reply = self.call(ClearTenant(tenant=tenant), timeout_s)
        assert isinstance(reply, Cleared)
        return reply.rows

    def end_session(self, session: str, tenant: str = "", *, timeout_s: float = 5.0) -> int:
        """End a session of a tenant's client, named as in its requests (docs/hints.md): the rows
        that it alone used are the next to be evicted. Returns how many these are; 0 also if the
        daemon knows no such session.

        Raises what ``call`` raises; ``UsageError`` if there can be no such tenant;
        ``Incompatible`` if the daemon is older than this message.
        """
        if not is_tenant_name(tenant or DEFAULT_TENANT):
            raise UsageError(f"tenant {tenant[:64]!r}: no tenant can have this name")
        self._require(END_SESSION, "end a session")
        message = EndSession(session=session_tag(session, tenant), tenant=tenant)
        reply = self.call(message, timeout_s)
        assert isinstance(reply, SessionEnded)
        return reply.rows

    def ask_session(
        self,
        session: str,
        tenant: str = "",
        *,
        fetch: bool = False,
        keys: bool = False,
        timeout_s: float = 30.0,
    ) -> SessionIs:
        """Where the rows of a session's last prompt are. With ``fetch`` they are also loaded into
        L1, which goes on after the answer. With ``keys``: what is needed to read them. 0 chunks:
        the daemon knows no prompt of it.

        Raises what ``end_session`` raises."""
        if not is_tenant_name(tenant or DEFAULT_TENANT):
            raise UsageError(f"tenant {tenant[:64]!r}: no tenant can have this name")
        self._require(SESSIONS, "show or fetch a session")
        tag = session_tag(session, tenant)
        message = AskSession(session=tag, tenant=tenant, fetch=fetch, keys=keys)
        reply = self.call(message, timeout_s)
        assert isinstance(reply, SessionIs)
        return reply

    def _require(self, feature: str, what: str) -> None:
        """Raise ``Incompatible`` if the daemon does not know ``feature`` and so cannot do
        ``what``."""
        welcome = self.connect(5.0)
        if feature not in welcome.features:
            raise Incompatible(f"the daemon (kvass {welcome.version}) cannot {what}; upgrade it")

    def empty_tier(self, tier: str, *, timeout_s: float = 30.0) -> None:
        """Forget all records of the tier with the name ``tier`` (as in ``kvass status``).

        Raises what ``call`` raises; ``Refused`` if there is no such tier or it could not do it."""
        self.call(EmptyTier(tier=tier), timeout_s)

    def prefetch(
        self, namespace: bytes, digests: bytes, width: int = 32, *, budget_s: float = 60.0
    ) -> int:
        """Promote a prompt's rows from tiers ahead of use. Waits at most ``budget_s``.

        Returns how many chunks, counted from the prompt's beginning, are in L1 then.

        ``namespace``: its digest (``kvass status`` has it as hex); ``digests``: all chunk hashes,
        ``width`` bytes each. Raises what ``call`` raises.
        """
        message = Prefetch(
            request="prefetch",
            digests=digests,
            width=width,
            namespace=namespace,
            budget_ms=bounded(budget_s * 1000),
        )
        reply = self.call(message, message.budget_ms / 1000 + 5.0)
        assert isinstance(reply, Prefetched)
        return reply.chunks

    def set_quota(self, quota: Quota, *, remove: bool = False, timeout_s: float = 5.0) -> None:
        """Set a tenant's quota, or with ``remove`` remove it.

        Raises what ``call`` raises; ``Refused`` if the daemon cannot accept the quota."""
        self.call(SetQuota(quota=quota, remove=remove), timeout_s)
