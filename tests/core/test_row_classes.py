"""Row classes: their indexes' memory, their tenants, and what a clear does to them."""

from __future__ import annotations

import msgspec
import pytest

from kvass.core.rows import index, row_classes
from kvass.core.rows.index import ABSENT
from kvass.core.rows.row_classes import Namespace
from kvass.messages import Register
from tests.core.rig import Rig
from tests.core.rows import Rows, keys, spec


def test_a_new_index_is_warm_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "WARMED", 64)
    rig = Rig(pages=4096, extent=64)
    e = rig.engine()
    assert rig.finish() > 5
    assert not rig.machine.state.allocator.unfinished
    e.store("a")
    assert e.clear() == 1
    assert rig.finish() > 5
    assert e.holds("a") == 0


def test_all_indexes_together_begin_with_so_much_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand namespaces would take as many times the memory of one."""
    monkeypatch.setattr(row_classes, "INDEX_ROOM", 1030)
    rig = Rig(pages=400, extent=4, instance_write_share=1.0)
    engines = [rig.engine(f"e{i}", identity={"model": f"m{i}"}) for i in range(3)]
    classes = rig.machine.state.classes.by_id.values()
    assert [one.index.room >= 400 for one in classes] == [True, True, False]
    engines[2].store(*range(300))
    assert engines[2].holds(*range(300)) == 300
    engines[0].quit()
    rig.engine("new", identity={"model": "new"})
    assert [one.index.room >= 400 for one in classes] == [True, False, True]


def test_a_removed_class_is_found_no_more_and_its_bytes_are_nobodys() -> None:
    core = Rows()
    kept, gone = core.classes.add(spec(), namespace=1), core.classes.add(spec(), namespace=2)
    core.store(kept, 1)
    rows = core.store(gone, 2, 3)
    core.classes.remove([2], [gone], "forgotten")
    assert list(core.classes.by_id) == [kept.id]
    assert core.rows.class_of(rows) is None
    assert core.classes.sets.cleared == 1
    assert core.classes.tenants.default.taken_bytes == 4, "one set of four slots"
    assert core.counters["bytes_evicted_cleared"] == 2


def test_a_clear_gives_a_namespace_new_classes_and_leaves_empty_ones() -> None:
    core = Rows()
    used, empty = (core.classes.add(spec(group), namespace=1) for group in range(2))
    core.store(used, 1, 2)
    ns = Namespace(1, b"", [used, empty], 16, Register("e", {}, 16))
    assert core.classes.clear([ns]) == 2
    new, same = ns.classes
    assert new.id != used.id
    assert same is empty
    assert new.index.find(keys(1)).tolist() == [ABSENT]
    assert core.classes.clear([ns]) == 0
    assert ns.classes == [new, empty]


def test_a_tenants_class_shares_the_index_and_goes_when_it_has_no_set() -> None:
    core = Rows()
    row_class = core.classes.add(spec(), namespace=1)
    tenant = core.classes.tenants._add("a")
    other = core.classes.paid_by(row_class, tenant)
    assert core.classes.paid_by(row_class, tenant) is other
    assert other.index is row_class.index
    assert not row_class.undivided
    core.classes.forget_empty(other)
    core.classes.forget_empty(row_class)
    assert list(core.classes.by_id.values()) == [row_class]
    assert row_class.undivided


@pytest.mark.parametrize(
    ("shards", "arena", "slots"),
    [((4,), 640, 16), ((4, 16), 640, 4), ((4,) * 32, 640, 1), ((100,), 640, 1)],
)
def test_an_extent_is_as_large_as_configured_and_a_set_is_a_sixteenth_of_the_arena_at_most(
    shards: tuple[int, ...], arena: int, slots: int
) -> None:
    core = Rows(arena, extent_bytes=64)
    one = msgspec.structs.replace(spec(), shard_bytes=shards)
    assert core.classes.add(one, namespace=1).slots_per_set == slots


def test_memory_of_removed_classes_is_given_back_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(row_classes, "GONE_A_STEP", 2)
    core = Rows()
    core.classes.remove([1], [core.classes.add(spec(), namespace=1) for _ in range(5)], "reset")
    left = []
    while core.classes.unfinished:
        core.classes.free_memory()
        left.append(len(core.classes._gone))
    assert left == [3, 1, 0]
