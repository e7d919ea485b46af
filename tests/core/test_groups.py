"""Layer groups that need less than the whole prompt: windows, local chunks, states."""

from __future__ import annotations

from typing import Any

import pytest

from kvass import messages as m
from kvass.core.effects import TierProbe
from kvass.core.handlers import granting
from kvass.types import GroupLayout, RankLayout
from tests.core.groups import CHUNK, FULL, SHORT, STATE, engine, fit
from tests.core.rig import BOOT, WIDTH, Engine, Rig, digests
from tests.core.tier_rig import TierRig


def test_no_window_is_written_where_no_full_row_is() -> None:
    """Negative control: with the full rows there, the same is granted."""
    e = engine(FULL, SHORT, STATE)
    assert e.reserve(*"ab", groups=6).reservation == 0
    e.store("a", groups=1)
    grant = e.reserve(*"ab", groups=6)
    assert grant.chunks == (0,)


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
