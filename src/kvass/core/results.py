"""What came of lookups, in the figures of namespaces, tenants and engines.

Law of this file: a lookup counts here and nowhere else, and once. One that is ``reported``
counts when its scheduler has reported the result, any other when it is answered.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvass.core.clients.registry import Instance
from kvass.core.metrics import MISSES
from kvass.core.rows.row_classes import Namespace
from kvass.core.state import State
from kvass.messages import LookupResult

MOST_TOKENS: Final = 1 << 32
"""The most tokens that a lookup counts, so that sums stay far below 2**63."""


def reported(
    state: State, instance: Instance, results: Iterable[LookupResult], tokens_s: float
) -> None:
    """Count what a scheduler reports. ``tokens_s``: how many tokens per second the engine computes;
    0: it is not known."""
    ns = state.namespace_of(instance)
    log = state.log.of(instance)
    for result in results:
        result.lookup_tokens = min(result.lookup_tokens, MOST_TOKENS)
        result.hit_tokens = min(result.hit_tokens, result.lookup_tokens)
        result.answer_tokens = min(result.answer_tokens, MOST_TOKENS)
        result.repeated_tokens = min(result.repeated_tokens, result.answer_tokens)
        why = "load_failed_here" if result.failed else result.why
        log.ended(result.request, why, result.hit_tokens)
        count(state, instance, ns, result)
    learn(state, instance, ns, tokens_s)


def count(
    state: State,
    instance: Instance,
    ns: Namespace | None,
    result: LookupResult,
    again: bool = False,
) -> None:
    """Count a lookup. ``again``: it continues the last lookup, and does not count as another."""
    why = result.why if result.why in MISSES else "absent"
    state.counters["lookups"] += not again
    if instance.terms.counted:
        state.tenants.of(result.tenant).traffic.count_lookup(state.now, result, why, again)
        if ns is not None:
            ns.traffic.count_lookup(state.now, result, why, again)
    instance.lookup_tokens += result.lookup_tokens
    instance.hit_tokens += result.hit_tokens
    instance.failed_loads += result.failed
    instance.saved.unpriced += result.hit_tokens
    instance.seen_s = state.now


def learn(state: State, instance: Instance, ns: Namespace | None, tokens_s: float) -> None:
    """The engine computes ``tokens_s`` tokens per second; 0: it is not known, so the last known
    speed of its namespace counts. Call it after ``count``."""
    if ns is None:
        instance.saved.learn(tokens_s)
        return
    saved = ns.traffic.saved
    known = saved.tokens_s > 0
    saved.learn(tokens_s)
    instance.saved.learn(saved.tokens_s)
    if saved.tokens_s and not known:
        for each in state.instances.values():
            if each.namespace == ns.id:
                each.saved.learn(saved.tokens_s)
