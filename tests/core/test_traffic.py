"""What a namespace was asked for and gave, by where it was, in all and in the last minute."""

from __future__ import annotations

import random
from typing import Any

from kvass.core.clients.traffic import Traffic
from kvass.messages import LookupResult
from tests.core.tier_rig import TierRig


def traffic(rig: TierRig) -> dict[str, Any]:
    (ns,) = rig.status["namespaces"]
    return {name: value for name, value in ns.items() if "tokens" in name or name == "lookups"}


def test_tokens_are_counted_by_where_they_were() -> None:
    """A hit of a tier, one of L1, and a miss. All of it again in the counters of chunks."""
    rig = TierRig()
    e = rig.ready()
    rig.only_in_tiers(e, "a", "b")
    tokens = rig.status["namespaces"][0]["chunk_tokens"]
    rig.look_up(e, "a", "b", "x")  # from the tier
    rig.look_up(e, "a", "b")  # from L1
    rig.look_up(e, "y")
    seen = traffic(rig)
    assert seen["miss_tokens"]["absent"] == sum(seen["miss_tokens"].values()) == 2 * tokens
    assert seen["stored_tokens"] == 2 * tokens
    assert seen["lookups"] == 3
    assert seen["lookup_tokens"] == 6 * tokens == rig.count("lookup_chunks") * tokens
    assert seen["hit_tokens"] == 4 * tokens == rig.count("hit_chunks") * tokens
    assert sum(seen["hit_tokens_tiers"]) == 2 * tokens == rig.count("promoted_chunks") * tokens
    assert seen["minute_lookup_tokens"] == seen["lookup_tokens"]
    rig.wait(61.0)
    assert traffic(rig)["minute_lookup_tokens"] == traffic(rig)["minute_hit_tokens"] == 0
    assert traffic(rig)["lookup_tokens"] == seen["lookup_tokens"]


def test_lookups_of_a_measurement_are_left_out_however_they_end() -> None:
    """Of the figures of its namespace and of its tenant; its instance counts them."""
    rig = TierRig()
    e, measurement = rig.ready(), rig.ready("bench", counted=False)
    rig.only_in_tiers(e, "a", "b")
    seen = [traffic(rig), rig.status["tenants"]]
    tokens = rig.status["namespaces"][0]["chunk_tokens"]
    (matched,) = rig.look_up(measurement, "a", "b", "x")  # from the tier
    assert matched.chunks == 2
    rig.look_up(measurement, "a", "b")  # from L1
    rig.look_up(measurement, "y")
    assert [traffic(rig), rig.status["tenants"]] == [
        seen[0],
        [
            one | {"l1_bytes": now["l1_bytes"]}
            for one, now in zip(seen[1], rig.status["tenants"], strict=True)
        ],
    ]
    assert [(one["lookup_tokens"], one["hit_tokens"]) for one in rig.status["engines"]] == [
        (0, 0),
        (6 * tokens, 4 * tokens),
    ]
    rig.look_up(e, "a")
    assert traffic(rig)["hit_tokens"] == rig.status["tenants"][0]["hit_tokens"] == tokens


def test_the_last_minute_is_fifty_to_sixty_seconds_and_its_memory_bounded() -> None:
    draw, counts, now = random.Random(1), list[tuple[float, int]](), 0.0
    seen = Traffic()
    for _ in range(2000):
        now += draw.expovariate(0.5)
        n = draw.randrange(100)
        seen.count_lookup(now, LookupResult("r", n, n // 2), "absent")
        counts.append((now, n))
        least = sum(k for t, k in counts if t > now - 50)
        most = sum(k for t, k in counts if t > now - 60)
        assert least <= seen.last_minute(now)[0] <= most
        assert len(seen.slots) <= 7
    assert (
        seen.lookup_tokens
        == sum(k for _, k in counts)
        == seen.hit_tokens + seen.miss_tokens["absent"]
    )
    assert (seen.loads, seen.failed_loads) == (sum(k > 1 for _, k in counts), 0)
    assert seen.last_minute(now + 60) == [0, 0, 0, 0]
