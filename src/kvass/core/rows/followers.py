"""Who follows rows: the features of the daemon that look at what becomes of rows.

Law of this file: it creates them. A new follower is a file with a ``Listener``, and a line here.
"""

from __future__ import annotations

from kvass.core.histogram import Histogram
from kvass.core.rows.counts import Counts
from kvass.core.rows.indexed import IndexedBlocks, IndexedKeys
from kvass.core.rows.left import LeftRows
from kvass.core.rows.listeners import Listeners
from kvass.core.rows.lru import LeastRecentlyUsed
from kvass.core.rows.policy import Policy
from kvass.core.rows.removed import RemovedRows
from kvass.core.rows.retention import Retention
from kvass.core.rows.saving import Saving
from kvass.core.rows.segment_index import SegmentIndex
from kvass.core.rows.session_tags import SessionTags
from kvass.core.rows.tables import CoreTables


class Followers:
    """The listeners of a core over ``tables``.

    ``counters``, ``ages``: as of ``Counts``. ``seed``: the secret from which keys are hashed.
    ``segment_bytes``: the memory of the segment index. ``keep_share``: as of ``CoreConfig``.
    """

    def __init__(
        self,
        tables: CoreTables,
        counters: dict[str, int],
        ages: Histogram,
        seed: bytes,
        segment_bytes: int,
        keep_share: float,
    ) -> None:
        self.saving = Saving()
        self.segments = SegmentIndex(segment_bytes, seed)
        self.removed = RemovedRows()
        self.left = LeftRows(seed, tables)
        self.kept = Retention(tables, keep_share)
        self.policy: Policy = LeastRecentlyUsed(tables, self.kept)
        self.tags = SessionTags(tables)
        self.listeners = Listeners(
            self.saving,
            IndexedKeys(),
            IndexedBlocks(counters),
            self.segments,
            self.removed,
            self.left,
            Counts(counters, ages, tables.table, tables.uses),
            self.policy,
            self.kept,
            self.tags,
        )
