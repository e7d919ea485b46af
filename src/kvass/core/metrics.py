"""Every counter and gauge of the core: its name, its meaning, and where a gauge is read.

An exporter needs no other file. ``kvass status --json`` shows all of them under these names: those
of the daemon at the top level (its counters in ``counters``), those of a tier and of a layer group
in tables of their own. ``messages`` counts what clients sent, by the message's tag. The core has no
clock and measures no durations, so there is no histogram. A tier's process adds fields to its
tier's table (``effects.TierReport``), which are not declared here.

A counter only grows, and begins at 0 in every boot. Counting under a name that is not declared is a
``KeyError``. A name that ends in ``_bytes`` is in bytes, one in ``_bytes_s`` in bytes per second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, get_args

from kvass.core.rows import FREE, LOADING, QUARANTINED, READY, TRANSIENT, WITHDRAWN, WRITING
from kvass.errors import ErrorCode

if TYPE_CHECKING:
    from kvass.core.row_store import RowClass
    from kvass.core.state import State

COUNTERS: Final[dict[str, str]] = {
    "lookups": "Lookups that were not refused.",
    "lookup_chunks": "Chunks that lookups asked for, beyond what the engine had itself.",
    "hit_chunks": "Chunks that lookups were given.",
    "promoted_chunks": "Chunks given by lookups that waited for a tier.",
    "prefetches": "Prefetches that were not refused.",
    "lookups_not_waited": "Lookups and prefetches that waited for no tier: too many did already.",
    "promotions_late": "Lookups and prefetches whose time was up before their tiers were done.",
    "promotions_cut": "Times that a promotion was shortened because L1 had no room for it.",
    "promotions_not_worth_it": "Promotions not begun: computing the tokens would be faster.",
    "chunks_wanted": "Chunks that reserves asked for and nobody had, within the instance's quota.",
    "chunks_granted": "Chunks that reserves were granted.",
    "bad_rows": "Rows dropped because a reader found their bytes to be wrong.",
    "lapsed_leases": "Leases that ended at their deadline, not by a release.",
    "flushes_lost": "Rows that left L1 before a tier they were queued for took them.",
    "evicted_capacity": "Rows evicted to make room for others of their layer group.",
    "evicted_handed_over": "Rows evicted because their memory went to another layer group.",
    "evicted_orphaned": "Rows of windows and states evicted with the full row they need.",
    "discarded_late": "Reservations discarded at their deadline.",
    "discarded_cleared": "Reservations discarded because their namespace was cleared.",
    "discarded_aborted": "Reservations discarded because a rank aborted.",
    "discarded_cancelled": "Reservations discarded before any rank was told of them.",
    "discarded_writer_lost": "Reservations discarded because a rank that had to commit was lost.",
    "discarded_moved": "Reservations discarded because their instance's weights were replaced.",
    **{f"refused_{code}": f"Requests refused with `{code}`." for code in get_args(ErrorCode)},
    **{f"ended_{code}": f"Sessions ended with `{code}`." for code in get_args(ErrorCode)},
}

MESSAGES: Final = "Messages that clients sent, by kind, refused ones included."

TIER_COUNTERS: Final[dict[str, str]] = {
    "loaded_rows": "Rows that the tier loaded into L1.",
    "load_misses": "Rows that the tier was asked to load and could not give.",
    "stored_rows": "Rows that the tier was given and holds.",
    "store_failures": "Rows that the tier was given and did not keep.",
    "stores_put_off": "Rows whose store was put off because the tier was down.",
    "stores_abandoned": "Rows not stored because the tier was down while the daemon stopped.",
    "epochs_unknown": "Times that the tier could not tell a namespace's epoch, or not note it.",
}


class Gauge(NamedTuple):
    """``read`` takes the state, and for a gauge of a tier or group its number or row class."""

    name: str
    meaning: str
    read: Callable[..., int]


def _filled_rows(row_class: RowClass) -> int:
    return sum(row_class.rows[state] for state in (WITHDRAWN, READY, TRANSIENT))


def _used_bytes(row_class: RowClass) -> int:
    return sum(row_class.rows[FREE + 1 :]) * row_class.spec.row_bytes


def _quarantined_bytes(row_class: RowClass) -> int:
    return row_class.rows[QUARANTINED] * row_class.spec.row_bytes


def _all_rows(state: State) -> int:
    return sum(map(_filled_rows, state.store.classes.values()))


def _all_used_bytes(state: State) -> int:
    return sum(map(_used_bytes, state.store.classes.values())) + state.store.cleared_bytes


def _discarded_bytes(state: State) -> int:
    return sum(r.size_bytes for r in state.reservations.all.values() if r.discarded)


def _load_bytes_s(state: State, tier: int) -> int:
    return int(state.tiers.speeds[tier].bytes_s)


GAUGES: Final = (
    Gauge("sessions", "Connections.", lambda s: len(s.sessions)),
    Gauge("instances", "Engines with a registered connection.", lambda s: len(s.instances)),
    Gauge("leases", "Matches whose rows are pinned for readers.", lambda s: len(s.leases.all)),
    Gauge("reservations", "Grants that may still be written.", lambda s: len(s.reservations.all)),
    Gauge("pins", "Pins on rows: by leases, promotions and flushes.", lambda s: s.store.pinned),
    Gauge("rows", "Rows that hold a chunk of a layer group.", _all_rows),
    Gauge("rows_loading", "Rows that a tier is filling.", lambda s: len(s.promotions.loading)),
    Gauge("quarantined_bytes", "Discarded, and may still be written.", _discarded_bytes),
    Gauge("l1_used_bytes", "Slots that are not free, and cleared memory.", _all_used_bytes),
    Gauge("l1_cleared_bytes", "Cleared, and not given back yet.", lambda s: s.store.cleared_bytes),
    Gauge("l1_capacity_bytes", "The arena.", lambda s: s.config.arena_bytes),
    Gauge("l1_populated_bytes", "The arena's populated part.", lambda s: s.populated_bytes),
    Gauge("promotions", "Lookups and prefetches that wait.", lambda s: len(s.promotions.all)),
)

TIER_GAUGES: Final = (
    Gauge("flush_queue_rows", "Rows queued for the tier.", lambda s, n: s.flushes.rows[n]),
    Gauge("storing_bytes", "What the tier is storing.", lambda s, n: s.flushes.bytes_out[n]),
    Gauge("loading_bytes", "What it is loading.", lambda s, n: s.tiers.speeds[n].loading_bytes),
    Gauge("load_bytes_s", "How fast it loads; 0: not known.", _load_bytes_s),
)

GROUP_GAUGES: Final = (
    Gauge("row_bytes", "The size of a row, all shards.", lambda c: c.spec.row_bytes),
    Gauge("rows", "Rows that hold a chunk.", _filled_rows),
    Gauge("rows_writing", "Rows that ranks are writing.", lambda c: c.rows[WRITING]),
    Gauge("rows_loading", "Rows that a tier is filling.", lambda c: c.rows[LOADING]),
    Gauge("quarantined_bytes", "Discarded, and may still be written.", _quarantined_bytes),
    Gauge("used_bytes", "Slots that are not free.", _used_bytes),
)
