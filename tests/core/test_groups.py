"""Layer groups that need less than the whole prompt: windows, local chunks, states."""

from __future__ import annotations

from typing import Any

import pytest

from kvass import messages as m
from kvass.core.effects import TierProbe
from kvass.core.handlers import granting
from kvass.types import PAGE, GroupLayout, RankLayout
from tests.core.rig import BOOT, WIDTH, Engine, Rig, digests
from tests.core.tier_rig import TierRig

CHUNK = 16


def group(kind: str, window: int = 0, pages: int = 1) -> GroupLayout:
    """Blocks of 4 tokens, whose page takes ``pages`` pages: 4 to a whole chunk."""
    return GroupLayout(kind, 4, ("a",), (pages * PAGE,), window)  # type: ignore[arg-type]


FULL, STATE = group("full"), group("state")
SHORT, LONG = group("sliding_window", 8), group("sliding_window", 40)  # 2 blocks; 3 chunks


def engine(*groups: GroupLayout, pages: int = 256, share: float = 1.0) -> Engine:
    rig = Rig(pages, extent=8, instance_write_share=share)
    return rig.engine(layout=RankLayout(groups), chunk_tokens=CHUNK)


def rows(e: Engine) -> list[int]:
    return [g["rows"] for g in e.rig.status["namespaces"][0]["groups"]]


def fit(found: m.Matched) -> tuple[int, list[int]]:
    """Where a match ends, and how many rows of each group it holds."""
    return found.chunks, [len(s) for s in found.slots]


def test_a_row_takes_what_a_hit_can_use() -> None:
    e = engine(FULL, SHORT, LONG, STATE)
    e.store("a", groups=15)
    sizes = [g["row_bytes"] // PAGE for g in e.rig.status["namespaces"][0]["groups"]]
    assert sizes == [4, 2, 4, 1]


def test_only_what_the_match_needs_is_pinned() -> None:
    e = engine(FULL, SHORT, LONG, STATE)
    e.store(*"abcdef", groups=15)
    found = e.lookup(*"abcdef")
    assert fit(found) == (6, [6, 1, 3, 1])
    assert e.rig.gauge("pins") == (11,)
    e.release(found.lease)
    assert e.rig.gauge("pins", "leases") == (0, 0)


def test_from_inside_the_prompt_only_the_rest_is_pinned() -> None:
    e = engine(FULL, SHORT, LONG, STATE)
    e.store(*"abcdef", groups=15)
    assert fit(e.lookup(*"abcdef", first=4)) == (6, [2, 1, 2, 1])
    assert fit(e.lookup(*"abcdef", first=6)) == (6, [])


def test_a_hit_ends_where_every_group_reaches() -> None:
    e = engine(FULL, STATE)
    e.store(*"abcdef", groups=1)
    assert e.holds(*"abcdef") == 0
    for chunks, name in ((2, "b"), (5, "e")):
        item = m.ReserveItem(
            request="r", digests=digests(*"abcdef"[:chunks]), first=chunks - 1, groups=2
        )
        (grant,) = e.reserve_items(item)
        assert grant.chunks == (chunks - 1,), name
        e.commit(grant.reservation)
        assert e.holds(*"abcdef") == chunks
    assert e.holds(*"abcd") == 2, "the state at 5 chunks is no use to a prompt of 4"


def test_a_window_with_a_hole_reaches_past_it_once_it_is_long_enough() -> None:
    e = engine(FULL, LONG)
    e.store(*"abcdefgh", groups=1)
    e.store("a", groups=2)  # then chunk b lacks its window
    item = m.ReserveItem(request="r", digests=digests(*"abcdefgh"), first=2, groups=2)
    (grant,) = e.reserve_items(item)
    assert e.holds(*"abcdefgh") == 1, "not yet committed"
    e.commit(grant.reservation)
    assert e.holds(*"abcd") == 1, "chunks c, d and b are needed"
    assert e.holds(*"abcde") == 5
    assert e.holds(*"abcdefgh") == 8


def test_a_match_leaves_chunks_spare() -> None:
    """What is left spare is neither given nor pinned; the windows and the state are those of the
    shorter hit."""
    e = engine(FULL, SHORT, LONG, STATE)
    e.store(*"abcdef", groups=15)
    found = e.lookup(*"abcdef", spare=1)
    assert (fit(found), found.spare) == ((5, [5, 1, 3, 1]), 1)
    assert e.rig.gauge("pins") == (10,)
    assert fit(e.lookup(*"abcxyz", spare=1)) == (2, [2, 1, 2, 1])
    assert fit(e.lookup(*"abcdef", first=4, spare=1)) == (5, [1, 1, 1, 1])
    assert fit(e.lookup(*"abcdef", first=5, spare=1)) == (5, [])
    assert fit(e.lookup(*"abcdef", spare=6)) == (0, [])
    assert fit(e.lookup(*"abcdef", spare=1 << 40)) == (0, [])
    assert fit(e.lookup(*"abcdef", spare=0)) == (6, [6, 1, 3, 1])


def test_a_state_before_what_is_spare_is_enough() -> None:
    """As vLLM leaves it: the last state a chunk before the last full one."""
    e = engine(FULL, STATE)
    e.store(*"abcdef", groups=1)
    e.store(*"abcde", first=4, groups=2)
    assert fit(e.lookup(*"abcdef", spare=1)) == (5, [5, 1])
    assert fit(e.lookup(*"abcdex", spare=1)) == (0, []), "the next tokens are others"


def test_no_window_is_written_where_no_full_row_is() -> None:
    """Negative control: with the full rows there, the same is granted."""
    e = engine(FULL, SHORT, STATE)
    assert e.reserve(*"ab", groups=6).reservation == 0
    e.store("a", groups=1)
    grant = e.reserve(*"ab", groups=6)
    assert grant.chunks == (0,)


def test_windows_alone_need_no_full_rows() -> None:
    e = engine(SHORT, LONG)
    e.store(*"abcdef", groups=3)
    assert fit(e.lookup(*"abcdef")) == (6, [1, 3])


def test_a_full_row_takes_its_windows_and_states_along() -> None:
    """Room for 24 chunks of 4 + 2 pages; the oldest prompt's rows leave together."""
    e = engine(FULL, SHORT, pages=144)
    for i in range(60):
        e.store(f"k{i}", groups=3)
    assert e.rig.count("evicted_orphaned") > 0
    full, short = rows(e)
    assert short <= full
    assert sum(e.holds(f"k{i}") for i in range(60)) == short


def test_of_one_store_the_shallow_windows_leave_first() -> None:
    e = engine(SHORT, pages=16)  # room for 8 rows
    e.store(*"abcdefgh", groups=1)
    e.store(*"xy")
    assert rows(e) == [8]
    assert e.holds(*"abcdefgh") == 8
    assert e.holds("a") == e.holds(*"ab") == 0


def test_a_lookup_keeps_young_what_a_hit_needs() -> None:
    e = engine(SHORT, pages=16)
    e.store(*"abcdefgh", groups=1)
    assert e.holds(*"abc") == 3
    e.store(*[f"x{i}" for i in range(7)])
    assert e.holds(*"abc") == 3
    assert e.holds(*"abcdefgh") == 3


def test_a_quota_counts_every_group() -> None:
    """A quarter of 64 pages is two chunks of 4 + 2 + 1."""
    e = engine(FULL, SHORT, STATE, pages=64, share=0.25)
    grant = e.reserve(*"abcd", groups=7)
    assert grant.chunks == (0, 1)
    assert list(map(len, grant.slots)) == [2, 2, 2]


def test_a_stage_without_layers_of_a_group_still_commits() -> None:
    rig = Rig(extent=8)
    scheduler, first, last = rig.open(), rig.open(), rig.open()
    common: dict[str, Any] = {"ranks": 2, "world_size": 2, "chunk_tokens": CHUNK}
    none = GroupLayout("sliding_window", 4, (), (), 8)
    rig.register(scheduler, **common)
    rig.register(first, **common, rank=0, shard=0, layout=RankLayout((FULL, SHORT)))
    made = rig.register(last, **common, rank=1, shard=1, layout=RankLayout((FULL, none)))
    e = Engine(rig, scheduler, [first, last], made.namespace)
    grant = e.reserve("a", groups=3)
    e.commit(grant.reservation, 0)
    assert e.holds("a") == 0
    e.commit(grant.reservation, 1)
    assert e.holds("a") == 1


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_reservations_of_one_chunk_in_two_groups_publish_by_themselves(
    order: tuple[int, int],
) -> None:
    e = engine(FULL, STATE)
    grants = e.reserve_items(
        m.ReserveItem(request="r", digests=digests("a"), groups=1),
        m.ReserveItem(request="r", digests=digests("a"), groups=2),
    )
    assert [g.chunks for g in grants] == [(0,), (0,)]
    for i in order:
        assert e.holds("a") == 0
        e.rig.say(e.workers[0], m.Commit(boot=BOOT, reservation=grants[i].reservation))
    assert e.holds("a") == 1


def test_of_many_layer_groups_fewer_chunks_are_looked_at() -> None:
    """A message of 8 keys names 4 chunks of two groups: more would take one step too long."""
    rig = Rig(256, extent=8, instance_write_share=1.0, keys_per_message=8)
    e = rig.engine(layout=RankLayout((FULL, FULL)), chunk_tokens=CHUNK)
    assert e.store(*"abcdef", groups=3).chunks == (0, 1, 2, 3)
    assert fit(e.lookup(*"abcdef")) == (4, [4, 4])
    assert fit(e.lookup(*"abcdef", first=3)) == (4, [1, 1])
    assert e.lookup(*"abcdef", first=5).chunks == 5
    assert not e.reserve(*"abcdef", groups=3, first=5).chunks
    assert rig.gauge("reservations") == (0,)


@pytest.mark.parametrize("kind", [m.Lookup, m.Prefetch])
def test_tiers_are_asked_for_the_chunks_that_are_looked_at(kind: Any) -> None:
    rig = TierRig(256, extent=8, keys_per_message=8)
    e = rig.ready(layout=RankLayout((FULL, FULL)), chunk_tokens=CHUNK)
    rig.say(e.scheduler, kind(seq=7, request="r", digests=digests(*"abcdef"), width=WIDTH))
    (probe,) = rig.open_ops(TierProbe)
    assert [len(batch.keys) for batch in probe.batches] == [4, 4]


def test_a_reserve_of_many_layer_groups_decides_fewer_chunks_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(granting, "ROWS_A_STEP", 4)
    grant = engine(FULL, FULL).reserve(*"abcde", groups=3)
    assert (grant.chunks, grant.later) == ((0, 1), 2)
