"""Segments in the core: what is indexed, what is found, and when it is found no more."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvass import messages as m
from kvass.blend.match import entry_bytes
from kvass.core.effects import Received, TiersAre
from kvass.core.event_lines import line, parse
from kvass.core.handlers import segments
from kvass.types import PAGE, GroupLayout, RankLayout
from tests.core.rig import GRACE_S, RESERVE_S, WIDTH, Engine, Rig, digests, key, layout
from tests.core.tier_rig import TierRig

SLIDING = GroupLayout("sliding_window", 16, ("b",), (PAGE,), 20)


def text(*names: object) -> bytes:
    """The tokens of chunks, packed: 16 that follow from each name."""
    return b"".join(
        (np.arange(16) + int.from_bytes(key(name)[:3], "big")).astype("<u4").tobytes()
        for name in names
    )


def index(engine: Engine, *names: object, **fields: Any) -> Any:
    each = {"digests": digests(*names), "tokens": text(*names), "width": WIDTH}
    message = m.IndexChunks(**{"seq": 21, "space": b"", **each, **fields})
    return engine.rig.ask(engine.scheduler, message)


def search(engine: Engine, tokens: bytes, **fields: Any) -> m.Segments:
    message = m.FindSegments(
        **{"seq": 22, "space": b"", "tokens": tokens, "width": WIDTH, **fields}
    )
    reply = engine.rig.ask(engine.scheduler, message)
    assert isinstance(reply, m.Segments), reply
    return reply


def found(engine: Engine, *names: object, **fields: Any) -> bytes:
    """The digests that a prompt of these chunks, after three other tokens, finds."""
    return search(engine, bytes(12) + text(*names), **fields).digests


def stored(engine: Engine, *names: object) -> None:
    engine.store(*names)
    assert index(engine, *names).chunks == len(names)


def test_chunks_are_found_in_another_order_with_where_they_stood() -> None:
    engine = Rig().engine()
    stored(engine, "a", "b", "c")
    reply = search(engine, text("b", "c") + bytes(8) + text("a"))
    assert reply.segments == (
        m.Segment(new_start=0, old_start=16, length=32, predecessor=key("a")),
        m.Segment(new_start=34, old_start=0, length=16),
    )
    assert reply.digests == digests("b", "c", "a")
    lease = engine.lookup("b", "c", "a")
    assert lease.chunks == 3
    engine.give_back(lease.lease)


def test_a_part_of_a_prompt_is_indexed_with_its_place() -> None:
    engine = Rig().engine()
    engine.store("a", "b")
    index(engine, "b", start=16, predecessor=key("a"))
    assert search(engine, text("b")).segments == (
        m.Segment(old_start=16, length=16, predecessor=key("a")),
    )
    assert found(engine, "a") == b""


def test_what_is_before_first_or_shorter_than_asked_is_left_out() -> None:
    engine = Rig().engine()
    stored(engine, "a", "b")
    stored(engine, "c")
    prompt = text("a", "b") + bytes(4) + text("c")
    assert search(engine, prompt, first=1).digests == digests("b", "c")
    assert search(engine, prompt, min_tokens=17).digests == digests("a", "b")


def test_only_chunks_that_have_rows_are_indexed_and_only_readable_ones_found() -> None:
    engine = Rig().engine()
    grant = engine.reserve("a")
    assert index(engine, "a", "x").chunks == 1
    assert found(engine, "a") == b""
    engine.hand_over(reservations=(grant.reservation,))
    engine.commit(grant.reservation)
    assert found(engine, "a", "x") == digests("a")


def test_what_will_not_be_published_is_not_indexed_any_more() -> None:
    rig = Rig()
    engine = rig.engine()
    grant = engine.reserve("a")
    index(engine, "a")
    engine.abort(grant.reservation)
    assert rig.gauge("indexed_chunks") == (0,)
    engine.store("a")
    assert found(engine, "a") == b""


def test_a_late_writer_ends_the_entry_of_its_own_row_only() -> None:
    """A row that was discarded and is freed later has the key of one that was stored since."""
    rig = Rig()
    engine = rig.engine()
    grant = engine.begin("a")
    rig.wait(RESERVE_S + 1)
    stored(engine, "a")
    engine.commit(grant.reservation)
    assert rig.gauge("quarantined_bytes") == (0,)
    assert found(engine, "a") == digests("a")


def test_an_entry_leaves_with_its_row_when_that_is_evicted() -> None:
    rig = Rig(pages=8, extent=1)
    engine = rig.engine()
    stored(engine, "old")
    for number in range(8):
        stored(engine, number)
    assert engine.holds("old") == 0
    assert found(engine, "old") == b""
    assert found(engine, 7) == digests(7)
    assert rig.gauge("indexed_chunks") == (rig.status["rows"],)


def test_of_two_groups_either_row_that_leaves_takes_the_entry_along() -> None:
    engine = Rig().engine(layout=layout(1, 1))
    engine.store("a", groups=1)
    assert index(engine, "a").chunks == 0
    engine.store("a", groups=2)
    assert index(engine, "a").chunks == 1
    allocator = engine.rig.machine.state.allocator
    second = engine.rig.machine.state.namespaces[0].classes[1]
    allocator._evict(second, second.index.rows(), "capacity")
    assert found(engine, "a") == b""


def test_a_clear_ends_all_entries_at_once_and_their_memory_comes_back_in_slices() -> None:
    rig = Rig(pages=256)
    engine = rig.engine()
    for first in range(0, 64, 8):
        stored(engine, *range(first, first + 8))
    assert rig.gauge("indexed_chunks") == (64,)
    assert rig.gauge("indexed_bytes") == (64 * entry_bytes(16),)
    engine.clear()
    assert found(engine, 1) == b""
    while rig.machine.next_deadline() == rig.now:
        rig.wait(0)
    assert rig.gauge("indexed_chunks", "indexed_bytes") == (0, 0)
    assert not rig.machine.state.classes.segments.sizes
    stored(engine, 1)
    assert found(engine, 1) == digests(1)


def test_a_clear_of_one_namespace_leaves_the_entries_of_others() -> None:
    rig = Rig()
    engine, other = rig.engine(), rig.engine("o", identity={"model": "other"})
    stored(engine, "a", "b")
    stored(other, "c")
    engine.clear()
    rig.wait(0)
    assert rig.gauge("indexed_chunks") == (1,)
    assert found(other, "c") == digests("c")


def test_a_namespace_that_makes_way_for_another_takes_its_entries_along() -> None:
    rig = Rig(namespaces=1)
    engine = rig.engine()
    stored(engine, "a")
    engine.quit()
    rig.wait(GRACE_S)
    other = rig.engine("o", identity={"model": "other"})
    rig.wait(0)
    assert rig.gauge("indexed_chunks") == (0,)
    assert found(other, "a") == b""


def test_a_new_generation_finds_nothing_of_the_one_before() -> None:
    rig = Rig()
    engine = rig.engine()
    stored(engine, "a")
    rig.register(engine.scheduler, generation=b"new weights")
    assert found(engine, "a") == b""


def test_spaces_and_namespaces_do_not_find_each_others_chunks() -> None:
    rig = Rig()
    engine, other = rig.engine(), rig.engine("o", identity={"model": "other"})
    twin = rig.engine("twin")
    engine.store("a")
    index(engine, "a", space=b"salt")
    assert found(engine, "a", space=b"salt") == digests("a")
    assert found(twin, "a", space=b"salt") == digests("a")
    for space in (b"", b"other", b"salt\1", bytes(32)):
        assert found(engine, "a", space=space) == b""
    other.store("b")
    index(other, "b", space=b"salt")
    assert found(other, "a", "b", space=b"salt") == digests("b")
    assert found(engine, "a", "b", space=b"salt") == digests("a")
    index(engine, "a", space=b"other")
    assert found(engine, "a", space=b"salt") == b""
    assert found(engine, "a", space=b"other") == digests("a")


def test_a_full_index_forgets_what_was_not_found_for_long() -> None:
    rig = Rig(pages=256, segment_index_bytes=8 * entry_bytes(16))
    engine = rig.engine()
    for number in range(8):
        stored(engine, number)
    assert found(engine, 0, 1)
    for number in range(8, 14):
        stored(engine, number)
    assert rig.gauge("indexed_chunks") == (8,)
    assert rig.count("chunks_unindexed") == 6
    assert rig.count("chunks_indexed") == 14
    assert found(engine, 0, 1) == digests(0, 1)


def test_in_a_namespace_with_other_groups_nothing_is_indexed() -> None:
    rig = Rig(pages=256)
    engine = rig.engine(layout=RankLayout((*layout(1).groups, SLIDING)))
    engine.store("a", groups=3)
    reply = index(engine, "a")
    assert (reply.code, reply.text) == (
        "bad_value",
        "segments: group 1 is sliding_window; chunks are reused only where all groups are full",
    )
    assert found(engine, "a") == b""


def test_an_engine_without_a_namespace_indexes_and_finds_nothing() -> None:
    rig = Rig()
    scheduler = rig.open()
    rig.register(scheduler)
    engine = Engine(rig, scheduler, [], b"")
    assert index(engine, "a").chunks == 0
    assert found(engine, "a") == b""


@pytest.mark.parametrize(
    ("code", "says", "fields"),
    [
        ("bad_value", "space: at most 32 bytes", {"space": bytes(33)}),
        ("bad_value", "2 bytes are no multiple of 4", {"tokens": bytes(2)}),
        ("bad_value", "15 tokens for 1 chunks of 16", {"tokens": bytes(60)}),
        ("bad_value", "predecessor: no digest of width 8", {"predecessor": b"x"}),
        ("limit", "tokens: at most 64 a message", {"tokens": bytes(4 * 65)}),
        ("limit", "at most 4 chunks", {"digests": digests(*"abcde"), "tokens": b""}),
    ],
)
def test_indexing_that_cannot_be_is_refused(code: str, says: str, fields: dict[str, Any]) -> None:
    engine = Rig(segment_tokens=64, segment_chunks=4).engine()
    engine.store("a")
    reply = index(engine, "a", **fields)
    assert (reply.code, says in reply.text) == (code, True), reply
    assert engine.rig.gauge("indexed_chunks") == (0,)


def test_a_search_from_outside_the_prompt_is_refused() -> None:
    engine = Rig().engine()
    message = m.FindSegments(seq=1, space=b"", tokens=text("a"), width=WIDTH, first=17)
    assert engine.rig.code(engine.scheduler, message) == "bad_value"


def test_the_tokens_of_so_many_chunks_are_searched_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(segments, "MOST_CHUNKS", 2)
    engine = Rig().engine()
    stored(engine, "a", "b", "c")
    assert search(engine, text("a", "b", "c")).digests == digests("a", "b")
    assert search(engine, text("a", "b", "c"), first=16).digests == digests("b", "c")


def test_only_so_many_sizes_of_chunks_are_indexed() -> None:
    rig = Rig(pages=512)
    replies = []
    for number in range(5):
        size = 16 << number
        engine = rig.engine(f"e{number}", chunk_tokens=size, identity={"model": f"{number}"})
        engine.store("a")
        replies.append(index(engine, "a", tokens=bytes(4 * size)))
    assert [type(reply) for reply in replies] == [m.Indexed] * 4 + [m.Error]
    assert replies[-1].code == "limit"


def test_a_worker_neither_indexes_nor_searches() -> None:
    engine = Rig().engine()
    message = m.FindSegments(seq=1, space=b"", tokens=b"", width=WIDTH)
    assert engine.rig.code(engine.workers[0], message) == "bad_rank"


def test_a_log_shows_no_tokens() -> None:
    event = Received(1, m.FindSegments(seq=1, space=b"s", tokens=text("a")))
    hidden = Received(1, m.FindSegments(seq=1, space=b"s", tokens=bytes(64)))
    assert parse(line(5.0, event)) == (5.0, hidden)
    assert parse(line(5.0, event, max_chars=None)) == (5.0, event)


# ---------------------------------------------------------------- tiers


def evicted() -> tuple[TierRig, Engine]:
    """An engine whose chunk "old" is in the tier, indexed, and not in L1 any more."""
    rig = TierRig(pages=8, extent=1)
    engine = rig.ready()
    stored(engine, "old")
    rig.answer_all()
    for number in range(8):
        engine.store(number)
        rig.answer_all()
    rig.replies(engine.scheduler)
    return rig, engine


def test_an_evicted_chunk_that_a_tier_has_is_found_and_promoted() -> None:
    rig, engine = evicted()
    assert rig.status["rows"] == 8
    assert found(engine, "old") == digests("old")
    matched = rig.look_up(engine, "old")[-1]
    assert (matched.chunks, rig.count("promoted_chunks")) == (1, 1)


def test_a_clear_ends_entries_whose_rows_are_in_a_tier_only() -> None:
    rig, engine = evicted()
    rig.say(engine.scheduler, m.Clear(seq=11))
    rig.answer_all()
    assert found(engine, "old") == b""
    rig.wait(GRACE_S)
    assert rig.gauge("indexed_chunks") == (0,)


def test_when_the_last_tier_is_removed_its_chunks_are_found_no_more() -> None:
    rig, engine = evicted()
    index(engine, 7)
    assert found(engine, 7, "old") == digests(7, "old")
    rig.step(TiersAre((), ()))
    assert found(engine, 7, "old") == b""
    index(engine, 7)
    assert found(engine, 7) == digests(7)


def test_after_a_tier_is_added_an_entry_stays_when_its_row_leaves_l1() -> None:
    rig = TierRig(pages=8, extent=1, tiers=0)
    engine = rig.ready()
    stored(engine, "old")
    rig.shelves.append(set())
    rig.notes.append({})
    rig.step(TiersAre((0,), ("tier0",)))
    rig.answer_all()
    for number in range(8):
        engine.store(number)
        rig.answer_all()
    assert found(engine, "old") == digests("old")
    assert rig.gauge("indexed_chunks") == (1,)
