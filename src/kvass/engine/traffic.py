"""Counters of what an engine did with kvass, for the engine's own metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from kvass.transfer.base import Done

MEANINGS: Final[dict[str, str]] = {
    "lookups": "Lookups of requests that got blocks.",
    "lookup_tokens": "Tokens looked up in kvass, beyond those in the engine's own cache.",
    "hit_tokens": "Looked-up tokens that were loaded from kvass.",
    "loads": "Loads of KV from kvass, by all ranks.",
    "loads_in_step": "Those of them inside a step, before its forward pass.",
    "load_bytes": "Bytes of KV loaded from kvass.",
    "load_seconds": "Time that loads took, from the step that began them.",
    "loads_late": "Loads that ended after their lease; the engine computes instead.",
    "loads_failed": "Loads that failed otherwise; the engine computes instead.",
    "stores": "Stores of KV to kvass, by all ranks.",
    "store_bytes": "Bytes of KV stored to kvass.",
    "store_seconds": "Time that stores took, from the step that began them.",
    "stores_late": "Stores that ended after their reservation; nothing was stored.",
    "stores_failed": "Stores that failed otherwise; nothing was stored.",
    "verified": "Rows read back after a copy and equal to L1, by all ranks.",
    "verify_failed": "Rows read back and not equal; the engine runs uncached from then on.",
    "not_verified": "Rows that were to be read back and could not be.",
    "unstored_requests": "Ended requests of which something was not stored, because vLLM needed "
    "their blocks or the daemon was late.",
    "blends": "Prompts for which segments were loaded that are not their prefix.",
    "blends_failed": "Prompts whose segments could not be loaded; the engine computes instead.",
    "blended_tokens": "Tokens in such segments that were not computed.",
    "shadow_lookups": "Prompts looked up in shadow mode.",
    "shadow_lookup_tokens": "Tokens looked up in shadow mode, beyond those in the engine's cache.",
    "shadow_hit_tokens": "Looked-up tokens that kvass has and the engine computed (shadow mode).",
    "shadow_saved_seconds": "Time that computing shadow_hit_tokens took.",
    "shadow_loads": "Loads into scratch memory, by all ranks (shadow mode).",
    "shadow_load_bytes": "Bytes of those loads.",
    "shadow_load_seconds": "Time that those loads took.",
    "shadow_not_compared": "Sampled hits that were not loaded and compared (shadow mode).",
    "shadow_differing_rows": "Loaded rows not equal to the computed KV to the last bit.",
    "shadow_wrong_rows": "Those of them with a difference as large as the values.",
    "announced_rows": "Rows announced in KV events.",
    "withdrawn_rows": "Rows withdrawn in KV events.",
    "event_resyncs": "Times that all announced rows were checked: removals may have been missed.",
}


class EngineTraffic:
    """The counters named in ``MEANINGS``. Used from one thread only."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, counts: Mapping[str, int]) -> None:
        self._counts.update(counts)

    def count(self, name: str, number: float = 1) -> None:
        self._counts[name] += number  # type: ignore[assignment]  # some are seconds

    def looked_up(self, tokens: int, hit: int) -> None:
        self._counts.update(lookups=1, lookup_tokens=tokens, hit_tokens=hit)

    def copied(self, done: Done) -> None:
        """Count a copy that ended."""
        kind = done.job.kind
        if done.ok:
            self._counts[f"{kind}s"] += 1
            self._counts[f"{kind}_bytes"] += done.job.bytes
            self._counts[f"{kind}_seconds"] += done.seconds  # type: ignore[assignment]  # a float
        else:
            self._counts[f"{kind}s_{'late' if done.outcome == 'late' else 'failed'}"] += 1

    def take(self) -> dict[str, int | float]:
        """The counters since the last call, without those that are 0."""
        if not self._counts:  # so it is after most steps
            return {}
        counts, self._counts = self._counts, Counter()
        return {name: number for name, number in counts.items() if number}
