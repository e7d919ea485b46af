"""Registration (laws 2 and 10): ranks are named, and a namespace covers all that changes bytes."""

from __future__ import annotations

from typing import Any

import pytest

from kvass.types import GroupLayout, RankLayout
from tests.core.rig import Rig, layout


def group(**fields: Any) -> RankLayout:
    good = {"kind": "full", "block_tokens": 16, "layers": ("a",), "page_bytes": (4096,)}
    return RankLayout(groups=(GroupLayout(**{**good, **fields}),))


def test_the_namespace_is_told_once_all_ranks_are_there(rig: Rig) -> None:
    scheduler, one, two = rig.open(), rig.open(), rig.open()
    common: dict[str, Any] = {"ranks": 2, "world_size": 2}
    reply = rig.register(scheduler, **common)
    assert (reply.namespace, reply.missing) == (b"", (0, 1))
    assert rig.register(two, rank=1, shard=1, **common).missing == (0,)
    reply = rig.register(one, rank=0, **common)
    assert len(reply.namespace) == 32
    assert reply.missing == ()
    assert rig.register(scheduler, **common).namespace == reply.namespace


def test_the_namespace_is_gone_while_a_rank_is(rig: Rig) -> None:
    e = rig.engine()
    e.store("a")
    rig.lose(e.workers[0])
    assert e.lookup("a").chunks == 0
    e.workers[0] = rig.open()
    assert rig.register(e.workers[0], rank=0).namespace == e.namespace
    assert e.lookup("a").chunks == 1


@pytest.mark.parametrize(
    "other",
    [
        {"identity": {"model": "n"}},
        {"identity": {"model": "m", "tag": ""}},
        {"identity": {}},
        {"chunk_tokens": 32},
        {"layout": layout(2)},
        {"layout": layout(1, 1)},
        {"layout": group(layers=("b",))},
        {"layout": group(block_tokens=8)},
        {"layout": group(layers=("a", "b"), page_bytes=(2048, 2048))},
        {"ranks": 2},
    ],
)
def test_whatever_changes_bytes_makes_another_namespace(rig: Rig, other: dict[str, Any]) -> None:
    assert rig.engine("one").namespace != rig.engine("two", **other).namespace


def test_which_rank_holds_or_writes_a_shard_matters(rig: Rig) -> None:
    names = set()
    worlds = [((0, 1), (0, 1)), ((1, 0), (0, 1)), ((0, 0), (0,)), ((0, 0), (1,))]
    for i, (shards, writers) in enumerate(worlds):
        world = len(set(shards))
        for rank, shard in enumerate(shards):
            session = rig.open()
            fields = {"ranks": 2, "world_size": world, "shard": shard, "writer": rank in writers}
            reply = rig.register(session, f"e{i}", rank=rank, **fields)
        names.add(reply.namespace)
    assert len(names) == 4


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"instance": ""}, "bad_value"),
        ({"instance": "x" * 513}, "bad_value"),
        ({"identity": {"k": "v" * 70_000}}, "limit"),
        ({"ranks": 0}, "bad_rank"),
        ({"ranks": -1}, "bad_rank"),
        ({"ranks": 129}, "bad_rank"),
        ({"rank": 1}, "bad_rank"),
        ({"rank": -2}, "bad_rank"),
        ({"world_size": 0}, "bad_value"),
        ({"world_size": 2}, "bad_value"),
        ({"shard": 1}, "bad_value"),
        ({"shard": -1}, "bad_value"),
        ({"chunk_tokens": 0}, "bad_value"),
        ({"rank": -1}, "bad_value"),
        ({"layout": None}, "bad_value"),
        ({"layout": RankLayout(groups=())}, "bad_value"),
        ({"layout": layout(*[1] * 65)}, "bad_value"),
        ({"layout": group(window_tokens=16)}, "bad_value"),
        ({"layout": group(kind="state", window_tokens=16)}, "bad_value"),
        ({"layout": group(kind="sliding_window")}, "bad_value"),
        ({"layout": group(kind="chunked_local", window_tokens=-1)}, "bad_value"),
        ({"layout": group(layers=(), page_bytes=())}, "bad_value"),
        ({"layout": group(block_tokens=0)}, "bad_value"),
        ({"layout": group(block_tokens=12)}, "bad_value"),
        ({"layout": group(layers=())}, "bad_value"),
        ({"layout": group(page_bytes=(1, 2))}, "bad_value"),
        ({"layout": group(page_bytes=(0,))}, "bad_value"),
        ({"layout": layout(17)}, "too_large"),
        ({"writer": False}, "contradiction"),
    ],
)
def test_a_register_that_makes_no_sense_is_refused(
    rig: Rig, wrong: dict[str, Any], code: str
) -> None:
    session = rig.open()
    reply = rig.register(session, **{"rank": 0, "layout": layout(1), **wrong})
    assert (reply.code, reply.seq) == (code, 2)
    assert rig.gauge("instances") == (0,)
    assert rig.register(session, rank=0).namespace


def test_a_second_live_rank_or_scheduler_is_refused(rig: Rig) -> None:
    e = rig.engine()
    intruder = rig.open()
    assert rig.register(intruder, rank=0).code == "rank_taken"
    assert rig.register(intruder).code == "rank_taken"
    rig.lose(e.scheduler)
    assert rig.register(intruder).namespace == e.namespace


def test_a_session_is_one_rank_of_one_instance(rig: Rig) -> None:
    session = rig.open()
    rig.register(session)
    assert rig.register(session).missing == (0,)
    assert rig.register(session, "other").code == "already_registered"
    assert rig.register(session, rank=0).code == "already_registered"


def test_an_instance_is_forgotten_with_its_last_session(rig: Rig) -> None:
    rig.engine().quit()
    assert rig.gauge("instances", "sessions") == (0, 0)
    assert rig.engine(identity={"model": "other"}).namespace


def test_a_models_name_for_people_separates_nothing(rig: Rig) -> None:
    """Nor does it contradict: older engines have it among the fields, and give no other."""
    one = rig.engine("one", model="/a/model", identity={"weights": "w"})
    two = rig.engine("two", model="/b/copy", identity={"weights": "w"})
    old = rig.engine("old", identity={"weights": "w", "model": "/c/old"})
    assert one.namespace == two.namespace != old.namespace
    assert (
        rig.register(rig.open(), "one", model="/d", identity={"weights": "w"}).code == "rank_taken"
    )
    shown = [space["model"] for space in rig.machine.status()["namespaces"]]
    assert shown == ["/a/model", "/c/old"]


def test_a_long_name_is_shown_in_part(rig: Rig) -> None:
    """512 engines of the longest names would make a status that no client takes."""
    rig.engine("one", model="m" * 4096, identity={"weights": "w"})
    rig.engine("two", identity={"model": "i" * 60_000})
    status = rig.machine.status()
    names = [one["model"] for one in (*status["namespaces"], *status["engines"])]
    assert [len(name) for name in names] == [256] * 4


def test_namespaces_are_limited_and_unused_empty_ones_make_way() -> None:
    rig = Rig(namespaces=2)
    full, empty = rig.engine("f"), rig.engine("g", identity={"model": "g"})
    full.store("a")
    full.quit()
    empty.store("a")
    empty.clear()
    empty.quit()
    assert rig.register(rig.open(), "h", rank=0, identity={"model": "h"}).namespace
    assert rig.engine("f").holds("a") == 1


def test_a_namespace_of_many_groups_takes_the_places_of_several() -> None:
    """A status names each group in one step."""
    rig = Rig(pages=1024, namespaces=32)
    engines = [
        rig.engine(name, identity={"model": name}, layout=layout(*[1] * 20)) for name in "abc"
    ]
    for e in (engines[1], engines[0], engines[2]):
        e.store("chunk")
    session = rig.open()
    wide: dict[str, Any] = {"rank": 0, "identity": {"model": "w"}, "layout": layout(*[1] * 40)}
    for e in engines[:2]:
        assert rig.register(session, "w", **wide).code == "limit"
        e.quit()
    engines[2].quit()
    assert rig.register(session, "w", **wide).namespace
    assert [ns["model"] for ns in rig.status["namespaces"]] == ["c", "w"]


def test_at_the_limit_the_namespace_used_longest_ago_makes_way() -> None:
    rig = Rig(namespaces=2)
    old, new = rig.engine("f"), rig.engine("g", identity={"model": "g"})
    old.store("a")
    new.store("a")
    session = rig.open()
    assert rig.register(session, "h", rank=0, identity={"model": "h"}).code == "limit"
    new.quit()
    old.quit()
    assert rig.register(session, "h", rank=0, identity={"model": "h"}).namespace
    assert rig.engine("g", identity={"model": "g"}).holds("a") == 1
