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
    "lookups": "Lookups of requests that got blocks.",
    "lookup_chunks": "Chunks that lookups asked for, those of repeated lookups included.",
    "hit_chunks": "Chunks in the answers to lookups, those of repeated lookups included.",
    "hit_blocks": "Blocks in these answers, of chunks that are hit only in part.",
    "promoted_chunks": "Chunks hit by lookups that waited for a tier or a store.",
    "l1_in_bytes": "Bytes of rows that became readable in L1.",
    "l1_lent_bytes": "Bytes of the rows that engines loaded.",
    "prefetches": "Prefetches that were not refused.",
    "lookups_await_stores": "Lookups that waited for rows that an engine was storing.",
    "lookups_not_waited": "Lookups and prefetches that did not wait: too many waited.",
    "promotions_late": "Lookups and prefetches that timed out before tiers or stores were done.",
    "promotions_cut": "Loads from tiers that were shortened because L1 had no room.",
    "promotions_not_worth_it": "Loads from tiers not begun because computing the tokens is faster.",
    "chunks_indexed": "Chunks that engines had indexed by their tokens (blend).",
    "chunks_unindexed": "Indexed chunks that others replaced because the index was full.",
    "segment_searches": "Searches of prompts for indexed chunks that were not refused.",
    "segment_search_tokens": "Tokens that were searched.",
    "segment_tokens": "Tokens of the segments that were found.",
    "not_kept_chunks": "Chunks that were not retained because their tenant may retain no more.",
    "sessions_ended": "Sessions of clients that have ended.",
    "session_rows_ended": "Rows of these that no other session had used.",
    "session_fetches": "Fetches of what a client's session will ask for (`kvass.then`, "
    "`kvass session --fetch`).",
    "chunks_wanted": "New chunks that engines asked to store, within their limits.",
    "chunks_granted": "Chunks that engines were allowed to store.",
    "tails_granted": "Those of `chunks_granted` of which only the first blocks are stored (tails).",
    "tails_replaced": "Tails freed because another row has all their blocks.",
    "not_granted_quota": "Chunks refused: the engine's unfinished stores held a quarter of L1.",
    "not_granted_no_room": "Chunks refused because all of L1 was in use.",
    "lapsed_leases": "Leases that ended at their deadline.",
    "flushes_lost": "Rows evicted before they were flushed to a tier.",
    "evicted_capacity": "Rows evicted to make room for others of their layer group.",
    "evicted_handed_over": "Rows evicted to make room for another layer group or tenant.",
    "evicted_ended": "Rows evicted before others, because their session had ended or is away.",
    "evicted_kept": "Retained rows evicted because nothing else could go.",
    "evicted_orphaned": "Rows of windows and states evicted with the full-attention row they need.",
    "bytes_evicted_capacity": "Bytes of the rows of `evicted_capacity`.",
    "bytes_evicted_handed_over": "Bytes of the rows of `evicted_handed_over`.",
    "bytes_evicted_ended": "Bytes of the rows of `evicted_ended`.",
    "bytes_evicted_kept": "Bytes of the rows of `evicted_kept`.",
    "bytes_evicted_orphaned": "Bytes of the rows of `evicted_orphaned`.",
    "bytes_evicted_not_retained": "Bytes of rows that were loaded from a tier and not kept in L1.",
    "bytes_evicted_replaced": "Bytes of tails freed because another row has all their blocks.",
    "bytes_evicted_cleared": "Bytes of rows that were cleared, or whose namespace was forgotten.",
    "unread_bytes_evicted": "Bytes of evicted rows that no lookup ever hit.",
    "discarded_late": "Reservations discarded at their deadline.",
    "discarded_cleared": "Reservations discarded because their namespace was cleared.",
    "discarded_aborted": "Reservations discarded because a rank aborted.",
    "discarded_cancelled": "Reservations discarded before any rank was told of them.",
    "discarded_writer_lost": "Reservations discarded because a rank was lost before its commit.",
    "discarded_moved": "Reservations discarded because their instance's weights were replaced.",
    **{f"refused_{code}": f"Requests refused with `{code}`." for code in get_args(ErrorCode)},
    **{f"ended_{code}": f"Sessions ended with `{code}`." for code in get_args(ErrorCode)},
    "ended_closed": "Sessions that the client ended.",
}

MESSAGES: Final = "Messages from clients by kind, refused ones included."

TIER_COUNTERS: Final[dict[str, str]] = {
    "loaded_rows": "Rows that the tier loaded into L1.",
    "load_misses": "Rows that the tier was asked to load and did not give.",
    "loaded_bytes": "Bytes of the rows that the tier loaded into L1.",
    "stored_rows": "Rows stored in the tier.",
    "stored_bytes": "Bytes of the rows stored in the tier.",
    "store_failures": "Rows that could not be stored in the tier.",
    "rows_over_budget": "Rows not stored because the tier was over its write budget.",
    "stores_put_off": "Rows whose store was delayed because the tier was down.",
    "stores_abandoned": "Rows not stored because the tier was down while the daemon stopped.",
    "epochs_unknown": "Times that the tier could not read or write a namespace's epoch.",
}


GAUGES: Final[dict[str, str]] = {
    "sessions": "Connections.",
    "instances": "Engines with a registered connection.",
    "leases": "Open leases: rows pinned for an engine that reads them.",
    "reservations": "Open reservations: slots that an engine may still write.",
    "pins": "Pins on rows by leases, loads from tiers and flushes.",
    "rows": "Readable rows; each holds one chunk of one layer group.",
    "rows_loading": "Rows that a tier is filling.",
    "quarantined_bytes": "Slots of discarded reservations that a rank may still write.",
    "l1_resting_bytes": "Slots that engines may still read or write because of a former daemon.",
    "l1_used_bytes": "Slots in use, and cleared memory.",
    "l1_cleared_bytes": "Cleared memory that is not free yet.",
    "l1_capacity_bytes": "Size of L1.",
    "l1_populated_bytes": "Part of L1 that is populated (resident).",
    "l1_kept_bytes": "Retained rows (`kvass.ttl`).",
    "engine_cache_bytes": "The engines' own KV caches together, as far as engines tell their size.",
    "indexed_chunks": "Chunks that are indexed by their tokens.",
    "indexed_bytes": "Memory of these in the daemon.",
    "promotions": "Lookups and prefetches that wait for a tier or a store.",
    "lease_oldest_s": "Age of the oldest lease.",
    "reservation_oldest_s": "Age of the oldest reservation.",
}

TIER_GAUGES: Final[dict[str, str]] = {
    "place": "Order in which tiers are asked, from 1; 0: removed while the daemon runs.",
    "flush_queue_rows": "Rows queued for the tier.",
    "flush_queue_oldest_s": "How long the first row of that queue has waited, in seconds.",
    "storing_bytes": "Bytes being stored now.",
    "failing_rows": "Rows that could not be stored since the last store that worked.",
    "last_failure_s": "How long ago a row could not be stored, in seconds; 0: never.",
    "loading_bytes": "Bytes being loaded now.",
    "load_bytes_s": "Measured load rate of the tier; 0: not known yet.",
}

NAMESPACE_COUNTERS: Final[dict[str, str]] = {
    "lookups": "Lookups of requests that got blocks.",
    "lookup_tokens": "Tokens that lookups asked for, beyond those in the engine's own cache.",
    "hit_tokens": "Those of them that engines loaded.",
    "hit_tokens_tiers": "Hit tokens that each tier loaded for the lookup.",
    "miss_tokens": "Tokens that lookups asked for and missed, by reason.",
    "stored_tokens": "Tokens whose rows were stored.",
    "loads": "Lookups whose hit was to be loaded.",
    "failed_loads": "Those of them whose load failed; the engine computed the tokens.",
    "answer_tokens": "Tokens of answers from which a later prompt went on.",
    "repeated_tokens": "Those of them that the later prompt repeated.",
    "saved_prefill_s": "Time to compute the hit tokens, at the speed that engines report; absent "
    "until one has.",
}

NODES: Final = "L1 on each NUMA node once all of it is populated, from a sample of its pages."

MISSES: Final[dict[str, str]] = {
    "absent": "Neither L1 nor a tier that is up has them, and no other reason is known.",
    "no_window_here": "Their full rows are cached, but no window is where the hit would end.",
    "evicted": "L1 evicted them to make room, and no tier that is up has them.",
    "over_quota": "L1 evicted them because their tenant had no more room.",
    "not_stored": "An engine computed them, but its store was refused or did not finish.",
    "other_namespace": "Only an engine with other settings or weights stored them.",
    "other_salt": "The engine saw the beginning of the prompt under another salt only.",
    "other_adapter": "The engine saw the beginning of the prompt with another adapter only.",
    "engine_busy": "The engine computed them, but could not hold their blocks for the store.",
    "tier_down": "L1 does not have them, and a tier is down.",
    "not_waited": "Too many lookups waited already.",
    "not_worth_it": "Computing them is faster than loading them.",
    "no_room": "L1 had no room to load them.",
    "load_failed": "A tier had them, but a load failed.",
    "late": "The lookup timed out before the tiers or stores were done.",
    "cleared": "They were cleared, or the engine's weights changed.",
    "no_answer": "The daemon did not answer the engine in time, or refused.",
    "load_failed_here": "Their copy into the engine failed or was late.",
    "cheaper_to_compute": "L1 had them, or a part, and computing them was faster than loading.",
    "other_node": "The daemon of another node of the engine had fewer of them.",
    "not_loaded": "L1 had them, but the engine took them from elsewhere or computed them.",
}
"""Why a lookup missed tokens that it asked for."""

HISTOGRAMS: Final[dict[str, str]] = {
    "lookup_tiers_seconds": "Time of lookups and prefetches that waited for tiers or stores.",
    "age_at_eviction_seconds": "How long evicted rows had not been used.",
    "reuse_gap_seconds": "How long the last chunk of a hit had not been used; one lookup in 8.",
}

LOOP_HISTOGRAMS: Final[dict[str, str]] = {
    "lookup_core_seconds": "Time until the daemon answers a lookup or asks the tiers.",
    "event_loop_lag_seconds": "Delay of the daemon's event loop, measured once a second.",
}
"""Histograms that the daemon's loop adds to the status."""

TIER_HISTOGRAMS: Final[dict[str, str]] = {
    "load_seconds": "Time of each load of up to 16 MiB from the tier.",
    "store_seconds": "Time of each store of up to 16 MiB to the tier.",
}

NAMESPACE_GAUGES: Final[dict[str, str]] = {
    "minute_lookup_tokens": "Tokens that lookups of the last minute asked for.",
    "minute_hit_tokens": "Those of them that engines loaded.",
    "minute_loads": "Lookups of the last minute whose hit was to be loaded.",
    "minute_failed_loads": "Those of them whose load failed.",
}

TENANT_COUNTERS: Final[dict[str, str]] = {
    "lookups": "Lookups of the tenant's requests that got blocks.",
    "lookup_tokens": "Tokens that its lookups asked for, beyond those in the engine's own cache.",
    "hit_tokens": "Those of them that engines loaded.",
    "evicted_bytes": "Bytes of its rows that were evicted to make room.",
}

TENANT_GAUGES: Final[dict[str, str]] = {
    "minute_lookup_tokens": "Tokens that its lookups of the last minute asked for.",
    "minute_hit_tokens": "Those of them that engines loaded.",
    "l1_bytes": "L1 that the tenant pays for, in whole extents (free slots included).",
    "kept_bytes": "Retained rows that the tenant pays for (`kvass.ttl`).",
    "cap_bytes": "Most L1 that the tenant may have; absent without a cap.",
    "reserved_bytes": "L1 reserved for the tenant.",
}

SHADOW: Final[dict[str, str]] = {
    "lookups": "Lookups.",
    "lookup_tokens": "Tokens that lookups asked for, beyond those in the engine's own cache.",
    "hit_tokens": "Those of them that kvass has. The engine computes them.",
    "saved_s": "Time to compute these hit tokens, at the speed that the engine measured; absent "
    "until it has.",
    "loads": "Loads into scratch memory, by all ranks.",
    "load_bytes": "Bytes of those loads.",
    "load_s": "Time that those loads took.",
    "not_compared": "Sampled hits that were not loaded and compared.",
    "compared_bytes": "Bytes that were loaded and compared with the computed KV.",
    "differing_rows": "Loaded rows that are not equal to the computed KV to the last bit.",
    "wrong_rows": "Those of them with a difference as large as the values, since the last clear.",
}
"""What engines in shadow mode found (gauges), in ``shadow`` of a namespace, of a model's removed
namespaces, and of an engine that is connected."""

SHADOW_GROUP: Final = "Largest difference between a loaded value and the computed one."

GROUP_GAUGES: Final[dict[str, str]] = {
    "row_bytes": "Size of a row, all shards together.",
    "rows": "Readable rows.",
    "rows_writing": "Rows that ranks are writing.",
    "rows_loading": "Rows that a tier is filling.",
    "quarantined_bytes": "Slots of discarded rows that a rank may still write.",
    "used_bytes": "Slots in use.",
}

ENGINE_FIELDS: Final[dict[str, str]] = {
    "lookup_tokens": "Tokens that its lookups asked for, beyond those in its own cache.",
    "hit_tokens": "Those of them that it loaded.",
    "failed_loads": "Lookups whose hit was to be loaded and whose load failed.",
    "saved_prefill_s": "Time to compute these, at the speed that it reports; null until it has.",
    "connected_s": "How long ago it registered first.",
    "seen_s": "How long ago its last lookup was, or a registration.",
}

TENANT_MISSES: Final[dict[str, str]] = {
    "miss_tokens": "Tokens that its lookups asked for and missed, by reason.",
}
