"""Bad input about ranks: refused by the field's name, and nothing else happens.

Nothing half-stored, nothing leaked, and the session goes on.
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
from tests.core.rig import RESERVE_S, WIDTH, Rig, digests, layout
from tests.core.tier_rig import TierRig


@pytest.fixture
def rig() -> Rig:
    return Rig(pages=256)


def state(rig: Rig) -> dict[str, Any]:
    """All that can be seen, but for what was said."""
    seen = dict(rig.status)
    return {k: v for k, v in seen.items() if k not in ("messages", "counters", "refusals")}


def refused(rig: Rig, session: int, message: m.FromClient) -> m.Error:
    """The refusal of ``message``, which changed nothing; the session goes on."""
    before = state(rig)
    reply = rig.ask(session, message)
    assert isinstance(reply, m.Error), reply
    assert not reply.fatal
    assert state(rig) == before
    assert isinstance(rig.ask(session, m.Ping(seq=99)), m.Pong)
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


@pytest.mark.parametrize(("wrong", "says"), WRONG_SCHEDULERS)
def test_a_scheduler_whose_strategy_contradicts_its_workers(
    rig: Rig, wrong: dict[str, Any], says: str
) -> None:
    workers = [rig.open(), rig.open()]
    for rank, session in enumerate(workers):
        rig.ask(session, terms(rank))
    scheduler = rig.open()
    no = refused(rig, scheduler, terms(**wrong))
    assert (no.code, no.text) == ("contradiction", says)
    lookup = m.Lookup(seq=3, request="r", digests=digests("a"), width=WIDTH)
    assert rig.code(scheduler, lookup) == "not_registered"
    assert rig.ask(scheduler, terms()).namespace, "with the right terms it is in"


@pytest.mark.parametrize(
    ("wrong", "code", "says"),
    [
        ({"rank": 2}, "bad_rank", "rank: 2 is outside the world of 2"),
        ({"rank": -2}, "bad_rank", "rank: -2 is outside"),
        ({"rank": 0}, "rank_taken", "rank 0 of instance 'e' is alive already"),
        ({"ranks": 129}, "bad_rank", "ranks: 129 is not in 1..128"),
        ({"shard": 2}, "bad_value", "shard: 2 is not in 0..1"),
        ({"shard": -1}, "bad_value", "shard: -1 is not in 0..1"),
        ({"world_size": 3}, "bad_value", "world_size: 3 is not in 1..2"),
        ({"shard": 0}, "contradiction", "writer: rank 0 writes shard 0 already"),
        ({"shard": 0, "writer": False}, "contradiction", "writer: no rank writes shards [1]"),
        ({"writer": False}, "contradiction", "writer: no rank writes shards [1]"),
        (
            {"shard": 0, "writer": False, "layout": layout(2)},
            "contradiction",
            "layout: differs from rank 0's of the same shard",
        ),
        ({"layout": layout(1, 1)}, "contradiction", "layout: groups "),
        ({"layout": None}, "bad_value", "layout: every worker gives one"),
    ],
)
def test_a_rank_that_cannot_be(rig: Rig, wrong: dict[str, Any], code: str, says: str) -> None:
    scheduler, first = rig.open(), rig.open()
    rig.ask(scheduler, terms())
    rig.ask(first, terms(0))
    second = rig.open()
    no = refused(rig, second, terms(**{"rank": 1, "shard": 1, "layout": layout(1), **wrong}))
    assert no.code == code
    assert says in no.text
    assert rig.ask(second, terms(1)).namespace, "with the right terms the world is complete"


def test_replicas_must_hold_the_same_bytes(rig: Rig) -> None:
    """MLA: equal sizes in other layers are other bytes."""
    mla = {"world_size": 1, "shard": 0}
    rig.ask(rig.open(), terms(0, **mla))
    other = GroupLayout(kind="full", block_tokens=16, layers=("b",), page_bytes=(PAGE,))
    wrong = terms(1, **mla, writer=False, layout=RankLayout(groups=(other,)))
    session = rig.open()
    assert refused(rig, session, wrong).text.startswith("layout: differs from rank 0's")
    assert rig.ask(session, terms(1, **mla, writer=False)).namespace


def test_engines_tell_the_size_of_their_own_caches_and_replicas_count_once(rig: Rig) -> None:
    mla = {"world_size": 1, "shard": 0, "cache_bytes": 100}
    ranks = [rig.open(), rig.open()]
    rig.ask(ranks[0], terms(0, **mla))
    rig.ask(ranks[1], terms(1, **mla, writer=False))
    rig.engine("dense", ranks=2, cache_bytes=30)
    rig.engine("silent")
    told = {engine["instance"]: engine["cache_bytes"] for engine in rig.status["engines"]}
    assert told == {"e": 100, "dense": 60, "silent": 0}
    assert rig.gauge("engine_cache_bytes") == (160,)
    rig.lose(*ranks)
    assert rig.gauge("engine_cache_bytes") == (60,)
    namespaces = {engine["namespace"] for engine in rig.status["engines"]}
    rig.engine("other size", ranks=2, cache_bytes=31)
    assert {engine["namespace"] for engine in rig.status["engines"]} == namespaces


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


def test_a_rank_that_comes_back_with_another_layout_makes_another_namespace(rig: Rig) -> None:
    """Its former life is over and contradicts nobody; its bytes are others, so the namespace is."""
    e = rig.engine(ranks=2)
    e.store("a")
    rig.lose(e.workers[1])
    e.workers[1] = rig.open()
    reply = rig.ask(e.workers[1], terms(1, layout=layout(3)))
    assert len(reply.namespace) == 32
    assert reply.namespace != e.namespace
    assert e.holds("a") == 0
    e.store("b")
    assert e.holds("b") == 1

    rig.lose(e.workers[1])
    e.workers[1] = rig.open()
    assert rig.ask(e.workers[1], terms(1)).namespace == e.namespace
    assert (e.holds("a"), e.holds("b")) == (1, 0)


def test_what_was_given_before_a_rank_came_back_changed_settles_as_it_was_given(rig: Rig) -> None:
    e = rig.engine(ranks=2)
    e.store("a")
    lease = e.lookup("a", readers=(0, 1)).lease
    grant = e.reserve("b")
    e.hand_over(leases=(lease,), reservations=(grant.reservation,))
    rig.lose(e.workers[1])
    e.workers[1] = rig.open()
    rig.ask(e.workers[1], terms(1, layout=layout(3)))
    assert e.commit(grant.reservation, 1) == e.release(lease, 1) == []
    assert rig.gauge("leases", "reservations") == (1, 1), "rank 0 still reads and writes"
    e.release(lease, 0)
    e.commit(grant.reservation, 0)
    rig.wait(RESERVE_S)
    assert rig.gauge("leases", "pins", "reservations", "quarantined_bytes") == (0, 0, 0, 0)
    assert rig.gauge("rows") == (1,)
    assert e.holds("b") == 0


def test_a_rank_that_comes_back_against_a_living_one_is_a_contradiction(rig: Rig) -> None:
    e = rig.engine(ranks=2)
    e.store("a")
    rig.lose(e.workers[1])
    session = rig.open()
    for wrong, says in (
        ({"layout": layout(1, 1)}, "layout: groups"),
        ({"shard": 0, "writer": False}, "writer: no rank writes shards [1]"),
        ({"identity": {"model": "n"}}, "identity[model]"),
    ):
        no = refused(rig, session, terms(1, **wrong))
        assert (no.code, no.text.startswith(says)) == ("contradiction", True)
        assert e.lookup("a").chunks == 0, "a rank is missing"
    e.workers[1] = session
    assert rig.ask(session, terms(1)).namespace == e.namespace
    assert e.holds("a") == 1


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
