"""What the planner knows of one live request."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from kvass.engine.protocols import Request

NEVER: Final = sys.maxsize


@dataclass
class SaltedHashes:
    """The hashes of a request's chunks with ``salt`` mixed in, as far as they were needed, and the
    engine's hashes that they were made from. Each of those depends on all before it."""

    salt: bytes = b""
    plain: list[bytes] = field(default_factory=list)
    hashes: bytearray = field(default_factory=bytearray)

    def first(self, plain: Sequence[bytes], salt: bytes) -> bytes:
        """``plain``, salted."""
        known, width = min(len(self.plain), len(plain)), len(plain[0])
        if self.salt != salt or (known and self.plain[known - 1] != plain[known - 1]):
            self.salt, self.plain, self.hashes = salt, [], bytearray()
        for hash_ in plain[len(self.plain) :]:
            self.plain.append(hash_)
            self.hashes += blake2b(hash_, digest_size=width, key=salt).digest()
        return bytes(self.hashes[: len(plain) * width])


@dataclass
class RequestState:
    """``offered``: chunks before this one were offered for storing, or were loaded; NEVER: none is
    stored any more. ``local``: tokens that the engine had itself when it last asked for a match.
    ``attempted``: its one load was begun.

    For a request with an adapter: ``match_since`` is the step in which its match was first asked
    for; ``store_since`` the step since which so many chunks wait for the adapter's salt.
    """

    request: Request
    offered: int = 0
    local: int = 0
    attempted: bool = False
    match_since: int | None = None
    store_since: tuple[int, int] | None = None
    salted: SaltedHashes = field(default_factory=SaltedHashes)

    def offer_again(self, since: int = 0) -> None:
        """Offer the chunks from ``since`` on once more."""
        if self.offered != NEVER:
            self.offered = min(self.offered, since)

    def digests(self, chunks: int, salt: bytes) -> tuple[bytes, int]:
        """The hashes of the first ``chunks`` chunks, back to back, and their width. ``salt``, if
        any, is mixed in."""
        if chunks <= 0:
            return b"", 0
        hashes = self.request.chunk_hashes(0, chunks)
        return self.salted.first(hashes, salt) if salt else b"".join(hashes), len(hashes[0])
