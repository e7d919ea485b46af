"""Bad input about ranks: refused by the field's name, and nothing else happens.

Nothing half-stored, nothing leaked, and the connection goes on.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvass import messages as m
from kvass.core.clients.registry import (
    Instance,
    differences,
    layout_digest,
    namespace_digest,
    row_class_specs,
    worker_of,
)
from kvass.types import PAGE, GroupLayout, RankLayout
from tests.core.groups import FULL, LONG, SHORT, STATE, engine
from tests.core.rig import Rig, layout
from tests.core.tier_rig import TierRig


@pytest.fixture
def rig() -> Rig:
    return Rig(pages=256)


def state(rig: Rig) -> dict[str, Any]:
    """All that can be seen, but for what was said."""
    seen = dict(rig.status)
    return {k: v for k, v in seen.items() if k not in ("messages", "counters", "refusals")}


def refused(rig: Rig, connection: int, message: m.FromClient) -> m.Error:
    """The refusal of ``message``, which changed nothing; the connection goes on."""
    before = state(rig)
    reply = rig.ask(connection, message)
    assert isinstance(reply, m.Error), reply
    assert not reply.fatal
    assert state(rig) == before
    assert isinstance(rig.ask(connection, m.Ping(seq=99)), m.Pong)
    return reply


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


WRONG_SCHEDULERS: list[tuple[dict[str, Any], str]] = [
    ({"ranks": 4}, "ranks: 4, but its instance said 2"),
    ({"ranks": 1, "world_size": 1}, "ranks: 1, but its instance said 2"),
    ({"world_size": 1}, "world_size: 1, but its instance said 2"),
    ({"identity": {"model": "n"}}, "identity[model]: 'n', but its instance said 'm'"),
    (
        {"identity": {"model": "m", "tp": "2"}},
        "identity[tp]: '2', but its instance said '(absent)'",
    ),
    ({"chunk_tokens": 32}, "chunk_tokens: 32, but its instance said 16"),
]


def test_replicas_must_hold_the_same_bytes(rig: Rig) -> None:
    """MLA: equal sizes in other layers are other bytes."""
    mla = {"world_size": 1, "shard": 0}
    rig.ask(rig.open(), terms(0, **mla))
    other = GroupLayout(kind="full", block_tokens=16, layers=("b",), page_bytes=(PAGE,))
    wrong = terms(1, **mla, writer=False, layout=RankLayout(groups=(other,)))
    connection = rig.open()
    assert refused(rig, connection, wrong).text.startswith("layout: differs from rank 0's")
    assert rig.ask(connection, terms(1, **mla, writer=False)).namespace


# ---------------------------------------------------------------- a rank that comes back changed


def test_an_l1_of_less_than_twice_these_caches_is_too_small_unless_there_is_a_tier() -> None:
    for rig, tiers in ((Rig(), 0), (TierRig(), 1)):
        half = rig.machine.state.config.arena_bytes // 2
        rig.engine("fits", cache_bytes=half)
        assert rig.machine.small_l1() == ""
        rig.engine("crosses", cache_bytes=1)
        assert bool(rig.machine.small_l1()) == (not tiers)


def test_an_engine_that_says_that_it_is_off_stays_what_it_is_and_is_shown(rig: Rig) -> None:
    e = rig.engine()
    e.store("a")
    (before,) = rig.status["engines"]
    world = {"ranks": 1, "world_size": 1}
    said = rig.register(e.scheduler, "e", **world, uncached="wrong " * 100)
    assert said.namespace == e.namespace
    (after,) = rig.status["engines"]
    assert (before["uncached"], after["uncached"]) == ("", ("wrong " * 100)[:300])
    assert e.holds("a") == 1
    too_long = rig.register(e.scheduler, "e", **world, uncached="x" * (1 << 20))
    assert too_long.code == "limit"


def test_a_row_takes_what_a_hit_can_use() -> None:
    e = engine(FULL, SHORT, LONG, STATE)
    e.store("a", groups=15)
    sizes = [g["row_bytes"] // PAGE for g in e.rig.status["namespaces"][0]["groups"]]
    assert sizes == [4, 2, 4, 1]


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
