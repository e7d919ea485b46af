"""The client of commands and web pages: status, clear, empty a tier, prefetch, set a quota."""

from __future__ import annotations

from typing import Any, Self

from kvass.client.endpoint import Endpoint
from kvass.messages import (
    Clear,
    Cleared,
    EmptyTier,
    Prefetch,
    Prefetched,
    SetQuota,
    Status,
    StatusReply,
)
from kvass.types import MOST_SECONDS, Quota


def bounded(value: float) -> float:
    """``value`` limited to what a message may carry (``Seconds``): negatives and NaN become 0."""
    return min(max(0.0, value), MOST_SECONDS)  # in this order: ``max`` keeps its first for a NaN


class Client(Endpoint):
    """A client without a registration. ``Client(path).status()`` is a complete use of it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def status(self, timeout_s: float = 5.0) -> dict[str, Any]:
        """The fields of ``kvass status``. Raises what ``call`` raises."""
        reply = self.call(Status(), timeout_s)
        assert isinstance(reply, StatusReply)
        return reply.fields

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
