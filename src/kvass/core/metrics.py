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
    "l1_in_bytes": "Bytes of rows that became readable in L1.",
    "l1_lent_bytes": "Bytes of rows that lookups were given.",
    "prefetches": "Prefetches that were not refused.",
    "lookups_not_waited": "Lookups and prefetches that waited for no tier: too many did already.",
    "promotions_late": "Lookups and prefetches whose time was up before their tiers were done.",
    "promotions_cut": "Times that a promotion was shortened because L1 had no room for it.",
    "promotions_not_worth_it": "Promotions not begun: computing the tokens would be faster.",
    "chunks_wanted": "Chunks that reserves asked for and nobody had, within the instance's quota.",
    "chunks_granted": "Chunks that reserves were granted.",
    "tails_granted": "Chunks of those granted of which only the first blocks are written: tails.",
    "tails_replaced": "Tails given up because another row has all their blocks.",
    "not_granted_quota": "Chunks not granted because they were above the instance's quota.",
    "not_granted_no_room": "Chunks not granted because all of L1 was in use.",
    "lapsed_leases": "Leases that ended at their deadline, not by a release.",
    "flushes_lost": "Rows that left L1 before a tier they were queued for took them.",
    "evicted_capacity": "Rows evicted to make room for others of their layer group.",
    "evicted_handed_over": "Rows evicted as their memory went to another layer group or tenant.",
    "evicted_orphaned": "Rows of windows and states evicted with the full row they need.",
    "bytes_evicted_capacity": "Bytes of the rows of `evicted_capacity`.",
    "bytes_evicted_handed_over": "Bytes of the rows of `evicted_handed_over`.",
    "bytes_evicted_orphaned": "Bytes of the rows of `evicted_orphaned`.",
    "bytes_evicted_not_retained": "Bytes of promoted rows that were not to stay in L1.",
    "bytes_evicted_replaced": "Bytes of tails given up because another row has all their blocks.",
    "bytes_evicted_cleared": "Bytes of rows that were cleared, or whose namespace was forgotten.",
    "unread_bytes_evicted": "Bytes of evicted rows that no lookup was ever given.",
    "discarded_late": "Reservations discarded at their deadline.",
    "discarded_cleared": "Reservations discarded because their namespace was cleared.",
    "discarded_aborted": "Reservations discarded because a rank aborted.",
    "discarded_cancelled": "Reservations discarded before any rank was told of them.",
    "discarded_writer_lost": "Reservations discarded because a rank that had to commit was lost.",
    "discarded_moved": "Reservations discarded because their instance's weights were replaced.",
    **{f"refused_{code}": f"Requests refused with `{code}`." for code in get_args(ErrorCode)},
    **{f"ended_{code}": f"Sessions ended with `{code}`." for code in get_args(ErrorCode)},
    "ended_closed": "Sessions that the client ended.",
}

MESSAGES: Final = "Messages that clients sent, by kind, refused ones included."

TIER_COUNTERS: Final[dict[str, str]] = {
    "loaded_rows": "Rows that the tier loaded into L1.",
    "load_misses": "Rows that the tier was asked to load and could not give.",
    "loaded_bytes": "Bytes of the rows that the tier loaded into L1.",
    "stored_rows": "Rows that the tier was given and holds.",
    "stored_bytes": "Bytes of the rows that the tier was given and holds.",
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
    "lease_oldest_s": "How long the oldest of the leases has been open.",
    "reservation_oldest_s": "How long the oldest of the reservations has been open.",
}

TIER_GAUGES: Final[dict[str, str]] = {
    "flush_queue_rows": "Rows queued for the tier.",
    "flush_queue_oldest_s": "How long the first row of that queue has waited.",
    "storing_bytes": "What the tier is storing now.",
    "loading_bytes": "What the tier is loading now.",
    "load_bytes_s": "How fast the tier loads; 0: not known yet.",
}

NAMESPACE_COUNTERS: Final[dict[str, str]] = {
    "lookups": "Lookups in the namespace.",
    "lookup_tokens": "Tokens that lookups asked for, beyond what the engine had itself.",
    "hit_tokens": "Tokens that lookups were given.",
    "hit_tokens_tiers": "Those of them that each tier loaded for the lookup.",
    "miss_tokens": "Tokens that lookups asked for and were not given, by reason.",
    "stored_tokens": "Tokens whose rows were stored.",
    "saved_prefill_s": "Time that computing the hits would have taken, as the engines told it.",
}

MISSES: Final[dict[str, str]] = {
    "absent": "Neither L1 nor a tier that is up has them.",
    "tier_down": "L1 does not have them, and a tier is down.",
    "not_waited": "Too many lookups waited for tiers already.",
    "not_worth_it": "Computing them is faster than loading them.",
    "no_room": "L1 had no room to load them.",
    "load_failed": "A tier had them and could not give them.",
    "late": "The lookup's time was up before the tiers were done.",
    "cleared": "They were cleared, or the engine's weights changed, while it waited.",
}
"""Why a lookup was not given what it asked for."""

HISTOGRAMS: Final[dict[str, str]] = {
    "lookup_tiers_seconds": "Time of lookups and prefetches that waited for tiers.",
    "age_at_eviction_seconds": "How long evicted rows had not been used.",
    "reuse_gap_seconds": "How long the last chunk of a hit had not been used; of one lookup in 8.",
}

LOOP_HISTOGRAMS: Final[dict[str, str]] = {
    "lookup_core_seconds": "Time in which the daemon answers a lookup, or asks the tiers.",
    "event_loop_lag_seconds": "How late the daemon's loop was, looked at once a second.",
}
"""Those that the daemon's loop adds to the status."""

TIER_HISTOGRAMS: Final[dict[str, str]] = {
    "load_seconds": "Time of each load of up to 16 MiB from the tier.",
    "store_seconds": "Time of each store of up to 16 MiB to the tier.",
}

NAMESPACE_GAUGES: Final[dict[str, str]] = {
    "minute_lookup_tokens": "Tokens that lookups of the last minute asked for.",
    "minute_hit_tokens": "Tokens that lookups of the last minute were given.",
}

TENANT_COUNTERS: Final[dict[str, str]] = {
    "lookups": "Lookups of the tenant.",
    "lookup_tokens": "Tokens that its lookups asked for, beyond what the engine had itself.",
    "hit_tokens": "Tokens that its lookups were given.",
    "evicted_bytes": "Rows that it paid for and that were evicted to make room.",
}

TENANT_GAUGES: Final[dict[str, str]] = {
    "minute_lookup_tokens": "Tokens that its lookups of the last minute asked for.",
    "minute_hit_tokens": "Tokens that its lookups of the last minute were given.",
    "l1_bytes": "Memory of L1 that it pays for, in whole extents: free slots count.",
    "cap_bytes": "Memory of L1 that it may have; none: it has no cap.",
    "reserved_bytes": "Memory of L1 that is reserved for it.",
}

GROUP_GAUGES: Final[dict[str, str]] = {
    "row_bytes": "The size of a row, all shards.",
    "rows": "Rows that hold a chunk.",
    "rows_writing": "Rows that ranks are writing.",
    "rows_loading": "Rows that a tier is filling.",
    "quarantined_bytes": "Slots of discarded rows, which may still be written.",
    "used_bytes": "Slots that are not free.",
}
