"""What anybody may ask of a daemon: its status, a clear, an empty tier, a prefetch, a quota."""

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
    """``value`` as a message may carry it (``Seconds``): a negative one and NaN are 0."""
    return min(max(0.0, value), MOST_SECONDS)  # in this order: ``max`` keeps its first for a NaN


class Client(Endpoint):
    """Asks the daemon at ``socket``. ``Client(path).status()`` is a complete use of it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def status(self, timeout_s: float = 5.0) -> dict[str, Any]:
        """The fields of ``kvass status``. Raises as ``call``."""
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
        """Forget rows, with ``tiers`` all records too; returns how many rows stopped matching.

        Raises as ``call``; ``Refused`` (``tier_down``) if a tier could not take note of it.
        """
        message = Clear(namespace=namespace, everything=everything, tiers=tiers)
        reply = self.call(message, timeout_s)
        assert isinstance(reply, Cleared)
        return reply.rows

    def empty_tier(self, tier: str, *, timeout_s: float = 30.0) -> None:
        """Forget all records of the tier of that name (``kvass status``). Raises as ``call``;
        ``Refused`` if there is none, or it could not."""
        self.call(EmptyTier(tier=tier), timeout_s)

    def prefetch(
        self, namespace: bytes, digests: bytes, width: int = 32, *, budget_s: float = 60.0
    ) -> int:
        """Have the tiers' rows of a prompt promoted, ahead of use; how many chunks of it, from its
        beginning, are in L1 after at most ``budget_s``.

        ``namespace``: its digest (``kvass status`` has it as hex); ``digests``: all chunk hashes,
        ``width`` bytes each. Raises as ``call``.
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
        """Give a tenant this quota from now on, or none (``remove``). Raises as ``call``;
        ``Refused`` if it cannot be."""
        self.call(SetQuota(quota=quota, remove=remove), timeout_s)
