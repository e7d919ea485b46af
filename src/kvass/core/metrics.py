"""Every counter and gauge of the core: its name and its meaning.

``status`` shows all of them under these names: those of the daemon at the top level (its counters
in ``counters``), those of a tier and of a layer group in tables of their own. ``messages`` counts
what clients sent, by the message's tag. A tier's process adds fields to its tier's table
(``effects.TierReport``), which are not declared here.

A counter only grows, and begins at 0 in every boot. Counting under a name that is not declared is a
``KeyError``. A name that ends in ``_bytes`` is in bytes, one in ``_bytes_s`` in bytes per second.
"""

from __future__ import annotations

from typing import Final, get_args

from kvass.errors import ErrorCode

COUNTERS: Final[dict[str, str]] = {
    "lookups": "Lookups that were not refused.",
    "lookup_chunks": "Chunks that lookups asked for, beyond what the engine had itself.",
    "hit_chunks": "Chunks that lookups were given.",
    "hit_blocks": "Blocks that lookups were given of a chunk of which they had only a part.",
    "promoted_chunks": "Chunks given by lookups that waited for a tier.",
    "prefetches": "Prefetches that were not refused.",
    "lookups_not_waited": "Lookups and prefetches that waited for no tier: too many did already.",
    "promotions_late": "Lookups and prefetches whose time was up before their tiers were done.",
    "promotions_cut": "Times that a promotion was shortened because L1 had no room for it.",
    "promotions_not_worth_it": "Promotions not begun: computing the tokens would be faster.",
    "chunks_wanted": "Chunks that reserves asked for and nobody had, within the instance's quota.",
    "chunks_granted": "Chunks that reserves were granted.",
    "tails_granted": "Chunks of those granted of which only the first blocks are written: tails.",
    "tails_replaced": "Tails given up because another row has all their blocks.",
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


GAUGES: Final[dict[str, str]] = {
    "sessions": "Connections.",
    "instances": "Engines with a registered connection.",
    "leases": "Matches whose rows are pinned for readers.",
    "reservations": "Grants whose slots may still be written.",
    "pins": "Pins on rows: by leases, promotions and flushes.",
    "rows": "Rows that hold a chunk of a layer group.",
    "rows_loading": "Rows that a tier is filling.",
    "quarantined_bytes": "Slots of discarded reservations, which may still be written.",
    "l1_used_bytes": "Slots that are not free, and cleared memory.",
    "l1_cleared_bytes": "Cleared memory that was not given back yet.",
    "l1_capacity_bytes": "The arena.",
    "l1_populated_bytes": "The part of the arena that is populated.",
    "promotions": "Lookups and prefetches that wait for a tier.",
}

TIER_GAUGES: Final[dict[str, str]] = {
    "flush_queue_rows": "Rows queued for the tier.",
    "storing_bytes": "What the tier is storing now.",
    "loading_bytes": "What the tier is loading now.",
    "load_bytes_s": "How fast the tier loads; 0: not known yet.",
}

NAMESPACE_COUNTERS: Final[dict[str, str]] = {
    "lookups": "Lookups in the namespace.",
    "lookup_tokens": "Tokens that lookups asked for, beyond what the engine had itself.",
    "hit_tokens": "Tokens that lookups were given.",
    "hit_tokens_tiers": "Those of them that each tier loaded for the lookup.",
}

NAMESPACE_GAUGES: Final[dict[str, str]] = {
    "minute_lookup_tokens": "Tokens that lookups of the last minute asked for.",
    "minute_hit_tokens": "Tokens that lookups of the last minute were given.",
}

GROUP_GAUGES: Final[dict[str, str]] = {
    "row_bytes": "The size of a row, all shards.",
    "rows": "Rows that hold a chunk.",
    "rows_writing": "Rows that ranks are writing.",
    "rows_loading": "Rows that a tier is filling.",
    "quarantined_bytes": "Slots of discarded rows, which may still be written.",
    "used_bytes": "Slots that are not free.",
}
