"""What the state remembers beside rows: refusals, forgotten models, engines' figures."""

from __future__ import annotations

from tests.core.rig import Rig


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
        e["instance"]: (e["lookup_tokens"], e["hit_tokens"], e["seen_s"])
        for e in rig.status["engines"]
    }
    assert figures == {"one": (32, 16, 5.0), "other": (16, 16, 0.0)}
