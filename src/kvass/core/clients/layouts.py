"""The layouts that ranks registered with, as they were encoded: whoever reads a namespace's rows
elsewhere registers with the same ones (``messages.EngineIs``).

Law of this file: it takes ``MOST_BYTES`` at most (law 12). If there is too much, the layouts that
were registered longest ago go. Nothing depends on one that is gone but a later export.

They are kept as bytes, for the reason that ``registry.py`` tells. Ranks with equal layouts share
one. Nothing here survives a restart: an engine that registers again brings its layouts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

from kvass.core.clients.registry import Instance
from kvass.messages import EngineIs, Register

MOST_BYTES: Final = 16 << 20
"""A layout of 80 layers takes 4 KiB."""
ENGINE_BYTES: Final = 1 << 20
"""The most that all layouts of one engine may take to be told."""
ENTRY_BYTES: Final = 256
"""Memory of a layout beside its bytes."""


class Layouts:
    def __init__(self) -> None:
        self.bytes = 0
        self._raw: dict[bytes, bytes] = {}
        """What was registered longest ago is first."""

    def __len__(self) -> int:
        return len(self._raw)

    def remember(self, raw: bytes) -> None:
        """A rank registered with the layout that is encoded as ``raw``."""
        digest = hashlib.sha256(raw).digest()
        if self._raw.pop(digest, None) is None:
            self.bytes += len(raw) + ENTRY_BYTES
        self._raw[digest] = raw
        while self.bytes > MOST_BYTES:
            self.bytes -= len(self._raw.pop(next(iter(self._raw)))) + ENTRY_BYTES

    def engine(self, terms: Register, model: str, ranks: Sequence[RankOf]) -> EngineIs | None:
        """How an engine with these ``ranks`` registers; ``None`` if that is not known any more, or
        would be too long to tell."""
        digests = list(dict.fromkeys(layout for _, _, layout in ranks))
        raw = [self._raw[digest] for digest in digests if digest in self._raw]
        if not ranks or len(raw) < len(digests) or sum(map(len, raw)) > ENGINE_BYTES:
            return None
        return EngineIs(
            model=model,
            identity=terms.identity,
            chunk_tokens=terms.chunk_tokens,
            world_size=terms.world_size,
            shards=tuple(shard for shard, _, _ in ranks),
            writers=tuple(rank for rank, (_, writer, _) in enumerate(ranks) if writer),
            which=tuple(digests.index(layout) for _, _, layout in ranks),
            layouts=tuple(raw),
        )


RankOf = tuple[int, bool, bytes]
"""Of one rank: its shard, whether it writes it, and the digest of its layout."""


def ranks_of(instance: Instance) -> tuple[RankOf, ...]:
    """The ranks of an instance whose ranks are all registered."""
    workers = (instance.workers[rank] for rank in range(instance.terms.ranks))
    return tuple((w.shard, w.writer, w.layout) for w in workers)
