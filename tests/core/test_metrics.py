"""Every number that the core shows is declared, and every declared one is shown."""

from __future__ import annotations

import re
from pathlib import Path

import kvass.core
from kvass.core.clients.lookup_log import NOT_LOADED
from kvass.core.explain import HINTS
from kvass.core.metrics import (
    COUNTERS,
    ENGINE_FIELDS,
    GAUGES,
    GROUP_GAUGES,
    HISTOGRAMS,
    LOOP_HISTOGRAMS,
    MISSES,
    NAMESPACE_COUNTERS,
    NAMESPACE_GAUGES,
    TENANT_COUNTERS,
    TENANT_GAUGES,
    TENANT_MISSES,
    TIER_COUNTERS,
    TIER_GAUGES,
    TIER_HISTOGRAMS,
)
from kvass.core.rows.causes import CAUSES
from kvass.core.rows.counts import EVICTED, LET_GO
from tests.core.tier_rig import TierRig

SOURCES = [path.read_text() for path in Path(kvass.core.__file__).parent.rglob("*.py")]


def test_what_is_counted_is_declared_and_what_is_declared_is_counted() -> None:
    text = "\n".join(SOURCES)
    counted = set(re.findall(r'counters(?:\[tier\])?\["(\w+)"\] \+=', text))
    for reason in (*EVICTED, "orphaned"):
        counted |= {f"evicted_{reason}", f"bytes_evicted_{reason}"}
    counted |= {f"bytes_evicted_{reason}" for reason in LET_GO}
    counted |= {f"discarded_{reason}" for reason in re.findall(r'discard\(\w+, "(\w+)"\)', text)}
    codes = {name for name in COUNTERS if name.startswith(("refused_", "ended_"))}
    assert counted - codes == (set(COUNTERS) | set(TIER_COUNTERS)) - codes
    reasons = set(re.findall(r'why(?:: str)? = (?:.*, )?"(\w+)"', text))
    found = set(re.findall(r'Ending\("(\w+)"', text)) - {"too_long"}  # of no token that is counted
    told = {
        *HINTS,
        "no_answer",
        "other_node",
        "load_failed_here",
        *NOT_LOADED,
    }  # the last: by engines
    assert reasons | found | set(CAUSES.values()) | told == set(MISSES)


def test_status_shows_what_is_declared_under_the_declared_names() -> None:
    rig = TierRig()
    rig.ready()
    status = rig.status
    (tier,), (namespace,) = status["tiers"], status["namespaces"]
    (group,) = namespace["groups"]
    tenant, _ = status["tenants"]
    other = {"boot", "version", "pid", "host", "up_s", "engines", "namespaces", "tiers", "messages"}
    other |= {"tenants", "counters", "histograms", "forgotten", "refusals"}
    assert set(status) == set(GAUGES) | other
    assert set(status["histograms"]) == set(HISTOGRAMS)
    named = {"namespace", "model", "epoch", "private", "chunk_tokens", "groups"}
    named |= {"like", "differs_in", "shadow"}
    assert set(namespace) == set(NAMESPACE_COUNTERS) | set(NAMESPACE_GAUGES) | named
    assert set(tier) == set(TIER_GAUGES) | set(TIER_COUNTERS) | set(TIER_HISTOGRAMS) | {"tier"}
    figures = TENANT_GAUGES | TENANT_COUNTERS | TENANT_MISSES
    assert set(tenant) == set(figures) | {"tenant", "quota"}
    assert set(ENGINE_FIELDS) < set(status["engines"][0])
    assert set(group) == set(GROUP_GAUGES) | {"group", "kind"}
    assert set(status["counters"]) == set(COUNTERS)
    for declared in (
        *(COUNTERS, TIER_COUNTERS, NAMESPACE_COUNTERS, TENANT_COUNTERS),
        *(TENANT_GAUGES, GAUGES, TIER_GAUGES, NAMESPACE_GAUGES, GROUP_GAUGES),
        *(HISTOGRAMS, LOOP_HISTOGRAMS, TIER_HISTOGRAMS, MISSES, TENANT_MISSES, ENGINE_FIELDS),
    ):
        assert all(re.fullmatch(r"[A-Z].*\.", meaning) for meaning in declared.values())
