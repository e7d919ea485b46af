"""How an engine is spread over worker processes.

Law of this file: values only. The one place that knows which rank holds, writes and reads what.
"""

from __future__ import annotations

import msgspec

from kvass.errors import UsageError
from kvass.types import MAX_RANKS


class ParallelStrategy(msgspec.Struct, frozen=True):
    """Tensor and pipeline parallel sizes; rank = pipeline rank * ``tp`` + tensor rank.

    ``mla``: every tensor rank holds the same bytes, so one shard per pipeline stage is distinct.
    Raises ``UsageError`` for sizes below 1 or more than ``MAX_RANKS`` ranks.
    """

    tp: int = 1
    pp: int = 1
    mla: bool = False

    def __post_init__(self) -> None:
        if self.tp < 1 or self.pp < 1 or self.tp * self.pp > MAX_RANKS:
            raise UsageError(
                f"tp {self.tp} x pp {self.pp}: use sizes of at least 1 and at most "
                f"{MAX_RANKS} ranks in all"
            )

    @property
    def ranks(self) -> int:
        """Worker processes."""
        return self.tp * self.pp

    @property
    def world_size(self) -> int:
        """Distinct shards of a row."""
        return self.pp if self.mla else self.ranks

    @property
    def readers(self) -> tuple[int, ...]:
        """The ranks that each read, and release, a match: all."""
        return tuple(range(self.ranks))

    def shard(self, rank: int) -> int:
        """The shard that ``rank`` holds."""
        return rank // self.tp if self.mla else rank

    def writer(self, rank: int) -> bool:
        """Whether ``rank`` is the one that writes its shard."""
        return not self.mla or rank % self.tp == 0
