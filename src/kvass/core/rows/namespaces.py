"""The namespaces of a core, and what stays of those that were removed.

Law of this file: no sum decreases when a namespace is removed, and an id never stands for two
digests, because ``LeftRows`` remembers rows of removed namespaces. One that comes back with its id
has the epoch that it had, because prompts of sessions are of an epoch.
"""

from __future__ import annotations

from itertools import count
from typing import Final

from kvass.core.clients.traffic import Traffic
from kvass.core.rows.row_classes import Namespace

_MODELS: Final = 64
"""The most models in ``Namespaces.forgotten``, besides ``other``."""


class Namespaces(dict[int, Namespace]):
    """The namespaces by id, the newest last. ``most``: how many there may be."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.by_digest: dict[bytes, Namespace] = {}
        self.forgotten: dict[str, Traffic] = {}
        """By model, the counts of namespaces that were removed."""
        self._most = most
        self._ids = count()
        self._former: dict[bytes, tuple[int, int]] = {}
        """By digest, the ids and epochs of the last namespaces that were removed."""

    def new_id(self, digest: bytes) -> tuple[int, int]:
        """The id and the epoch of a namespace that is to be added."""
        former = self._former.pop(digest, None)
        if len(self._former) > self._most:
            del self._former[next(iter(self._former))]
        return (next(self._ids), 0) if former is None else former

    def add(self, ns: Namespace) -> None:
        self[ns.id] = self.by_digest[ns.digest] = ns

    def remove(self, ns: Namespace, epoch: int) -> None:
        """Remove a namespace; if it comes back it is in ``epoch``. Its counts are added to those of
        its model, or of ``other`` if there are too many models."""
        model = ns.model if len(self.forgotten) < _MODELS or ns.model in self.forgotten else "other"
        fresh = Traffic(from_tiers=[0] * len(ns.traffic.from_tiers))
        self.forgotten.setdefault(model, fresh).add(ns.traffic)
        del self[ns.id], self.by_digest[ns.digest]
        self._former[ns.digest] = ns.id, epoch
