"""What the state remembers beside rows: refusals, forgotten models, engines' figures."""

from __future__ import annotations

import pytest

from kvass.core import state
from kvass.core.state import CoreConfig, State
from kvass.types import PAGE, Quota
from tests.core.rig import Rig
from tests.core.rows import spec


def test_engines_that_are_refused_are_named_until_they_register() -> None:
    rig = Rig()
    for name in range(10):
        rig.register(rig.open(), f"e{name}", rank=0, ranks=1, world_size=2, shard=5)
    rig.wait(3.0)
    refused = {r["instance"]: (r["text"], r["age_s"]) for r in rig.status["refusals"]}
    assert list(refused) == [f"e{name}" for name in range(2, 10)]
    assert refused["e9"][1] == 3.0
    assert refused["e9"][0] == "world_size: 2 is not in 1..1"
    rig.engine("e9")
    assert "e9" not in {r["instance"] for r in rig.status["refusals"]}


def test_an_engine_has_figures_of_its_own() -> None:
    rig = Rig()
    one, other = rig.engine("one"), rig.engine("other")
    one.store("a")
    one.holds("a", "b")
    rig.wait(5.0)
    other.holds("a")
    figures = {
        e["instance"]: (e["lookup_tokens"], e["hit_tokens"], e["seen_s"], e["connected_s"])
        for e in rig.status["engines"]
    }
    assert figures == {"one": (32, 16, 5.0, 5.0), "other": (16, 16, 0.0, 5.0)}


def test_an_engine_has_its_part_of_the_prefill_that_was_saved() -> None:
    rig = Rig()
    one, other = rig.engine("one"), rig.engine("other")
    one.store("a", "b")
    one.lookup("a", "b", prefill_tokens_s=8.0)
    other.lookup("a", prefill_tokens_s=16.0)
    other.lookup("a", prefill_tokens_s=0.5)  # slower than any engine is: the last known counts
    saved = {e["instance"]: e["saved_prefill_s"] for e in rig.status["engines"]}
    assert saved == {"one": 4.0, "other": 2.0}
    assert rig.status["namespaces"][0]["saved_prefill_s"] == sum(saved.values())


def test_what_a_forgotten_namespace_counted_stays_under_its_model_for_so_many_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state, "_MODELS", 2)
    rig = Rig(namespaces=1)
    for model in "abcca":
        e = rig.engine(model, identity={"model": model})
        e.holds("x")
        e.quit()
    rig.engine("last", identity={"model": "last"})
    counted = {f["model"]: f["lookups"] for f in rig.status["forgotten"]}
    assert counted == {"a": 2, "b": 1, "other": 2}


def test_a_hit_that_has_only_what_the_engine_has_itself_takes_no_lease() -> None:
    rig = Rig()
    e = rig.engine()
    e.store("a")
    assert e.lookup("a", first=1).lease == 0
    assert rig.count("hit_chunks") == rig.count("l1_lent_bytes") == 0
    lease = e.lookup("a").lease
    assert (rig.count("hit_chunks"), rig.count("l1_lent_bytes")) == (1, 0)
    e.hand_over(leases=(lease,))
    e.release(lease)
    assert (rig.count("hit_chunks"), rig.count("l1_lent_bytes")) == (1, PAGE)


def test_an_extent_is_64_mib_or_a_64th_of_a_small_arena() -> None:
    sizes = []
    for arena in (1 << 20, 64 << 30):
        made = State(CoreConfig(b"boot", arena))
        sizes.append(made.classes.add(spec(row_bytes=1024), namespace=1).slots_per_set * 1024)
    assert sizes == [(1 << 20) // 64, 64 << 20]


def test_quotas_of_the_start_are_in_force() -> None:
    made = State(CoreConfig(b"boot", 1 << 20, quotas=(Quota("a", reserved_bytes=1 << 19),)))
    assert made.tenants.all["a"].reserved_bytes == 1 << 19
