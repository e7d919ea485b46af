"""What an instance says of itself, and its namespace. The rest is in ``scripts/admission.txt``."""

from __future__ import annotations

from typing import Any

from kvass import messages as m
from kvass.core.clients.registry import (
    Instance,
    differences,
    layout_digest,
    namespace_digest,
    row_class_specs,
    worker_of,
)
from kvass.types import PAGE, RankLayout
from tests.core.rig import Rig, layout
from tests.core.tier_rig import TierRig


def terms(rank: int = -1, **fields: Any) -> m.Register:
    """Of a world of two ranks, dense."""
    good = {
        "instance": "e",
        "identity": {"model": "m"},
        "chunk_tokens": 16,
        "rank": rank,
        "ranks": 2,
        "world_size": 2,
        "shard": max(rank, 0),
        "layout": None if rank < 0 else layout(1),
    }
    return m.Register(seq=2, **{**good, **fields})


def test_an_l1_of_less_than_twice_these_caches_is_too_small_unless_there_is_a_tier() -> None:
    for rig, tiers in ((Rig(), 0), (TierRig(), 1)):
        half = rig.machine.state.config.arena_bytes // 2
        rig.engine("fits", cache_bytes=half)
        assert rig.machine.small_l1() == ""
        rig.engine("crosses", cache_bytes=1)
        assert bool(rig.machine.small_l1()) == (not tiers)


def test_why_an_engine_is_off_is_shown_in_short() -> None:
    rig = Rig()
    rig.engine()
    rig.register(rig.open(), "off", uncached="wrong " * 100)
    assert {each["uncached"] for each in rig.status["engines"]} == {"", ("wrong " * 100)[:300]}


# ---------------------------------------------------------------- an instance by itself


def instance(identity: dict[str, str], *layouts: RankLayout, generation: bytes = b"") -> Instance:
    """A complete instance with a rank, of a shard of its own, per layout."""
    said = [
        terms(rank, identity=identity, ranks=len(layouts), world_size=len(layouts), layout=shape)
        for rank, shape in enumerate(layouts)
    ]
    workers = {
        one.rank: worker_of(one, shape, layout_digest(shape))
        for one, shape in zip(said, layouts, strict=True)
    }
    return Instance("e", said[0], workers=workers, generation=generation)


def test_a_namespace_is_a_digest_of_all_that_changes_bytes_and_of_no_order() -> None:
    base = instance({"model": "m", "dtype": "x"}, layout(1), layout(1))
    same = instance({"dtype": "x", "model": "m"}, layout(1), layout(1))
    assert namespace_digest(base) == namespace_digest(same)
    others = [
        instance({"model": "m", "dtype": "y"}, layout(1), layout(1)),
        instance({"model": "m", "dtypex": ""}, layout(1), layout(1)),
        instance({"model": "m", "dtype": "x"}, layout(1), layout(2)),
        instance({"model": "m", "dtype": "x"}, layout(2), layout(1)),
        instance({"model": "m", "dtype": "x"}, layout(1)),
        instance({"model": "m", "dtype": "x"}, layout(1), layout(1), generation=b"g"),
    ]
    digests = {namespace_digest(each) for each in [base, *others]}
    assert len(digests) == 1 + len(others)


def test_a_rank_is_missing_until_it_registers_and_every_shard_needs_one_writer() -> None:
    full = instance({}, layout(1), layout(1))
    assert (full.missing, full.writers) == ((), (0, 1))
    assert full.covers_all_shards((0, 1))
    assert not full.covers_all_shards((0,))
    assert not full.covers_all_shards((0, 1, 1))
    del full.workers[0]
    assert (full.missing, full.writers) == ((0,), (1,))


def test_a_slot_has_the_bytes_of_every_shard_in_the_order_of_shards() -> None:
    (one, two) = row_class_specs(instance({}, layout(1, 2), layout(3, 4)))
    assert (one.group, one.shard_bytes, one.row_bytes) == (0, (PAGE, 3 * PAGE), 4 * PAGE)
    assert (two.group, two.shard_bytes) == (1, (2 * PAGE, 4 * PAGE))


def test_differences_name_the_fields_and_short_values_only() -> None:
    ours = terms(identity={"model": "m", "old": "1", "long": "x"})
    theirs = terms(identity={"model": "n", "long": "y" * 41}, chunk_tokens=32)
    assert differences(ours, theirs) == (
        "chunk_tokens: 32, not 16",
        "long",
        "model: n, not m",
        "old: (absent), not 1",
    )
    assert differences(ours, ours) == ("the layout of the KV cache",)
    many = terms(identity={str(n): "" for n in range(100)})
    assert len(differences(ours, many)) == 8
