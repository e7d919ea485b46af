"""What counts of a lookup: its result if the scheduler reports it, else its answer."""

from __future__ import annotations

from typing import Any

from kvass import messages as m
from tests.core.rig import BOOT, Engine, Rig
from tests.core.test_explain import entries
from tests.core.tier_rig import TierRig

CHUNK = 16


def say(e: Engine, *results: m.LookupResult, speed: float = 0.0) -> list[Any]:
    message = m.HandedOver(boot=BOOT, results=results, prefill_tokens_s=speed)
    return e.rig.say(e.scheduler, message)


def result(lookup_tokens: int, hit_tokens: int = 0, **fields: Any) -> m.LookupResult:
    return m.LookupResult("r", lookup_tokens, hit_tokens, **fields)


def figures(rig: Rig, *names: str) -> list[Any]:
    (ns,) = rig.status["namespaces"]
    return [ns[name] for name in names]


COUNTED = ("lookups", "lookup_tokens", "hit_tokens", "loads", "failed_loads")


def test_a_reported_lookup_counts_once_with_its_result() -> None:
    """However often it was asked and answered before. To the token: its hit ended in a chunk."""
    rig = Rig()
    e = rig.engine()
    e.store("a")
    for _ in range(3):
        assert e.lookup("x", reported=True, prompt_tokens=50).lease == 0
        e.give_back(e.lookup("a", "b", reported=True, prompt_tokens=50).lease)
    assert figures(rig, *COUNTED) == [0, 0, 0, 0, 0]
    assert rig.count("lookups") == rig.count("l1_lent_bytes") == 0
    assert say(e, result(40, 12, why="absent", tenant="t"), speed=8.0) == []
    assert figures(rig, *COUNTED, "saved_prefill_s") == [1, 40, 12, 1, 0, 1.5]
    assert figures(rig, "minute_lookup_tokens", "minute_hit_tokens") == [40, 12]
    assert figures(rig, "miss_tokens")[0]["absent"] == 28
    (tenant,) = (t for t in rig.status["tenants"] if t["tenant"] == "t")
    assert (tenant["lookups"], tenant["lookup_tokens"], tenant["hit_tokens"]) == (1, 40, 12)
    (engine,) = rig.status["engines"]
    assert (engine["lookup_tokens"], engine["hit_tokens"]) == (40, 12)
    assert rig.count("lookups") == 1


def test_a_failed_load_is_no_hit_and_a_figure_of_its_own() -> None:
    rig = Rig()
    e = rig.engine()
    for _ in range(20):
        say(e, result(16, why="load_failed_here", failed=True), speed=8.0)
    assert figures(rig, *COUNTED, "saved_prefill_s") == [20, 320, 0, 20, 20, 0.0]
    assert figures(rig, "minute_loads", "minute_failed_loads") == [20, 20]
    assert figures(rig, "miss_tokens")[0]["load_failed_here"] == 320
    assert rig.status["engines"][0]["failed_loads"] == 20
    rig.wait(61.0)
    assert figures(rig, "minute_loads", "minute_failed_loads") == [0, 0]


def test_hits_of_a_tier_count_when_they_are_loaded() -> None:
    rig = TierRig()
    e = rig.ready()
    rig.only_in_tiers(e, "a", "b")
    (matched,) = rig.look_up(e, "a", "b", reported=True)
    assert (matched.chunks, sum(matched.tiers)) == (2, 2 * CHUNK)
    assert figures(rig, "hit_tokens", "hit_tokens_tiers") == [0, [0] * len(matched.tiers)]
    say(e, result(40, 24, tiers=matched.tiers))
    assert figures(rig, "hit_tokens")[0] == sum(figures(rig, "hit_tokens_tiers")[0]) == 24
    say(e, result(40, tiers=(1 << 53, 5, 7), failed=True))
    assert sum(figures(rig, "hit_tokens_tiers")[0]) == 24


def test_saved_time_is_not_known_until_a_speed_is() -> None:
    """Then hits of before count, of all engines of the namespace; and later ones at the last known
    speed."""
    rig = Rig()
    one, other = rig.engine("one"), rig.engine("other")
    one.store("a")
    assert figures(rig, "saved_prefill_s") == [0.0], "nothing was hit, so nothing was saved"
    say(one, result(16, 16))
    say(other, result(16, 8))
    assert figures(rig, "saved_prefill_s") == [None]
    assert [e["saved_prefill_s"] for e in rig.status["engines"]] == [None, None]
    say(other, speed=8.0)
    assert figures(rig, "saved_prefill_s") == [3.0]
    assert [e["saved_prefill_s"] for e in rig.status["engines"]] == [2.0, 1.0]
    say(one, result(16, 16))
    assert figures(rig, "saved_prefill_s") == [5.0]
    one.lookup("a")
    assert figures(rig, "saved_prefill_s") == [7.0], "also hits of engines that report nothing"


def test_what_an_engine_reports_is_bounded() -> None:
    rig = Rig()
    e = rig.engine()
    say(e, result(0, 1 << 53), result(1 << 53, 1 << 53, why="of a newer engine"))
    assert figures(rig, *COUNTED) == [2, 1 << 32, 1 << 32, 1, 0]
    worker = m.HandedOver(boot=BOOT, results=(result(16),))
    assert rig.code(e.workers[0], worker) == "bad_rank"
    wrong = m.HandedOver(boot=BOOT, leases=(77,), results=(result(16),))
    assert rig.code(e.scheduler, wrong) == "unknown_lease", "what is refused changes nothing"
    assert figures(rig, "lookups") == [2]


def test_an_entry_for_each_result_and_none_for_repeats() -> None:
    """Whatever the answers before it were."""
    rig = Rig()
    e = rig.engine()
    told = {"reported": True, "prompt_tokens": 50}
    e.lookup("a", **told)
    e.store("a")
    lease = e.lookup("a", **told).lease
    (entry,) = entries(rig)
    assert (entry["why"], entry["hit_tokens"], entry["times"]) == ("", 16, 2)
    e.hand_over(leases=(lease,))
    say(e, result(16, 16))
    e.lookup("a", "b", **told)  # after a preemption
    say(e, result(32, failed=True))
    first, second = entries(rig)
    assert (first["why"], first["hit_tokens"]) == ("", 16)
    assert (second["why"], second["hit_tokens"], second["times"]) == ("load_failed_here", 0, 1)
    e.lookup("a", **told)
    say(e, result(16, why="not_loaded"))
    third = entries(rig)[-1]
    assert (third["why"], third["hit_tokens"]) == ("not_loaded", 0)
