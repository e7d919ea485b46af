"""Hits that end inside of a chunk: rows that are used in part, and tails."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import pytest

from kvass import messages as m
from kvass.core.effects import Send, Stopping
from kvass.core.metrics import COUNTERS
from kvass.types import PAGE, GroupLayout, RankLayout
from tests.core.rig import LEASE_S, WIDTH, Engine, Rig, digests
from tests.core.tier_rig import TierRig

BLOCKS = 4
"""Blocks of a chunk."""


def full(*block_tokens: int) -> RankLayout:
    """A group per argument; a shard of a chunk takes a page."""
    return RankLayout(
        tuple(GroupLayout("full", n, ("a",), (PAGE * n // 16,)) for n in block_tokens)
    )


class Prompt:
    """A prompt of single letters, one a block. A hash names all letters up to its block."""

    def __init__(self, text: str) -> None:
        raw = [blake2b(text[: i + 1].encode(), digest_size=WIDTH // 2) for i in range(len(text))]
        hashes = [one.hexdigest() for one in raw]
        whole = len(text) // BLOCKS * BLOCKS
        self.chunks = hashes[BLOCKS - 1 : whole : BLOCKS]
        self.hashes, self.rest = hashes, hashes[whole:]


@pytest.fixture
def engine(rig: Rig) -> Engine:
    return rig.engine(layout=full(4))


def reserve(e: Engine, text: str, first: int = 0, **item: Any) -> Any:
    p = Prompt(text)
    blocks = digests(*p.hashes[first * BLOCKS :])
    return e.reserve(*p.chunks, first=first, blocks=blocks, **item)


def store(e: Engine, text: str, first: int = 0, **item: Any) -> Any:
    """Store all blocks of ``text``: its chunks, and what is left as a tail."""
    grant = reserve(e, text, first, **item)
    if grant.reservation:
        e.hand_over(reservations=(grant.reservation,))
        for rank in range(len(e.workers)):
            e.commit(grant.reservation, rank)
    return grant


def lookup(e: Engine, text: str, **fields: Any) -> Any:
    p = Prompt(text)
    return e.lookup(*p.chunks, blocks=digests(*p.rest), **fields)


def hit(e: Engine, text: str) -> tuple[int, int]:
    """Chunks and blocks that match, asked as a client asks: once more where the match ended."""
    found = lookup(e, text)
    if found.lease:
        e.give_back(found.lease)
    if found.chunks < len(Prompt(text).chunks):
        found = lookup(e, text[: (found.chunks + 1) * BLOCKS - 1], again=True)
        if found.lease:
            e.give_back(found.lease)
    return found.chunks, found.blocks


def test_a_prompt_uses_the_first_blocks_of_a_chunk(engine: Engine) -> None:
    store(engine, "abcdefgh")
    assert hit(engine, "abcdefx") == (1, 2)
    assert hit(engine, "abcdefgx") == (1, 3)
    assert hit(engine, "ab") == (0, 2)
    assert hit(engine, "abcdefghx") == (2, 0)
    assert hit(engine, "xbcd") == (0, 0)


def test_a_prompt_of_which_no_chunk_is_there_takes_one_lookup(rig: Rig, engine: Engine) -> None:
    """If it says the first blocks of the chunk that it lacks first."""

    def cold(text: str, first: int, *blocks: str) -> Any:
        asked = engine.lookup(*Prompt(text).chunks, first=first, first_blocks=digests(*blocks))
        if asked.lease:
            engine.give_back(asked.lease)
        return asked.chunks, asked.blocks

    store(engine, "abcdefgh")
    assert cold("abxxyyyy", 0, *Prompt("abx").hashes) == (0, 2)
    assert cold("abcdefxxyyyy", 1, *Prompt("abcdefx").hashes[4:]) == (1, 2)
    assert cold("abcdxxxx", 0, *Prompt("abc").hashes) == (1, 0), "a chunk matches"
    assert cold("xxxxyyyy", 0, *Prompt("xxx").hashes) == (0, 0)
    assert rig.gauge("pins") == (0,)


def test_the_row_that_is_used_in_part_is_the_last_one_and_is_pinned(
    rig: Rig, engine: Engine
) -> None:
    slots = store(engine, "abcdefgh").slots[0].offsets(0, PAGE).tolist()
    found = lookup(engine, "abcdef")
    assert (found.chunks, found.blocks) == (1, 2)
    assert found.slots[0].offsets(0, PAGE).tolist() == slots
    assert rig.gauge("leases", "pins") == (1, 2)
    engine.hand_over(leases=(found.lease,))
    engine.release(found.lease)
    assert rig.gauge("leases", "pins") == (0, 0)


def test_blocks_alone_are_a_hit_with_a_lease(rig: Rig, engine: Engine) -> None:
    store(engine, "abcdefgh")
    found = lookup(engine, "abcdef", first=1)
    assert (found.first, found.chunks, found.blocks, len(found.slots[0])) == (1, 1, 2, 1)
    assert found.lease
    rig.wait(LEASE_S)
    assert rig.gauge("leases", "pins") == (0, 0)


def test_blocks_after_a_chunk_that_is_missing_are_no_hit(engine: Engine) -> None:
    store(engine, "abcdefgh", first=1)
    found = lookup(engine, "abcdefg")
    assert (found.chunks, found.blocks, found.lease) == (0, 0, 0)


def test_of_an_item_that_is_there_in_part_the_rest_is_known_by_its_own_blocks(
    engine: Engine,
) -> None:
    store(engine, "abcd")
    assert store(engine, "abcdefghi").chunks == (1, 2)
    assert hit(engine, "abcdefx") == (1, 2)
    assert hit(engine, "abcdefghi") == (2, 1)


def test_what_ends_inside_a_chunk_is_stored_as_a_tail(rig: Rig, engine: Engine) -> None:
    grant = store(engine, "abcdef")
    assert grant.chunks == (0, 1)
    assert hit(engine, "abcdefgh") == (1, 2)
    assert hit(engine, "abcdex") == (1, 1)
    assert rig.count("tails_granted") == 1


def test_a_tail_matches_only_when_it_is_complete(rig: Rig, engine: Engine) -> None:
    grant = reserve(engine, "ab")
    assert hit(engine, "ab") == (0, 0)
    engine.abort(grant.reservation)
    assert hit(engine, "ab") == (0, 0)
    assert rig.gauge("rows", "reservations") == (0, 0)


def test_a_tail_that_is_being_written_is_waited_for(rig: Rig, engine: Engine) -> None:
    """Unless some row has as many blocks."""
    store(engine, "abcdef")
    one = reserve(engine, "abcdefg", first=1)
    engine.hand_over(reservations=(one.reservation,))
    assert lookup(engine, "abcdef", writing=True).blocks == 2
    p = Prompt("abcdefg")
    rest = digests(*p.rest)
    message = m.Lookup(
        seq=8, request="r", digests=digests(*p.chunks), width=WIDTH, blocks=rest, writing=True
    )
    assert rig.say(engine.scheduler, message) == []
    engine.commit(one.reservation)
    (reply,) = (e.message for e in rig.last if isinstance(e, Send))
    assert isinstance(reply, m.Matched)
    assert (reply.chunks, reply.blocks) == (1, 3)


def test_a_tail_that_some_row_has_is_not_granted(engine: Engine) -> None:
    store(engine, "abcdefgh")
    assert store(engine, "abcdef").chunks == ()
    store(engine, "xyz")
    assert store(engine, "xy").chunks == ()
    assert store(engine, "xyz").chunks == ()


def test_a_tail_gives_way_to_the_chunk_and_to_a_longer_tail(rig: Rig, engine: Engine) -> None:
    store(engine, "a")
    store(engine, "abc")
    assert rig.gauge("rows") == (1,)
    assert hit(engine, "abc") == (0, 3)
    store(engine, "abcd")
    assert (rig.gauge("rows"), rig.count("tails_replaced")) == ((1,), 2)
    assert hit(engine, "abx") == (0, 2)


def test_a_tail_that_is_read_stays_until_its_last_reader(rig: Rig, engine: Engine) -> None:
    store(engine, "ab")
    found = lookup(engine, "ab")
    store(engine, "abcd")
    assert rig.gauge("rows", "pins") == (2, 1)
    other = lookup(engine, "ab")
    assert other.slots != found.slots, "the chunk's row serves it now"
    engine.give_back(found.lease)
    engine.give_back(other.lease)
    assert rig.gauge("rows", "pins") == (1, 0)


def test_of_rows_that_begin_alike_the_longest_is_found(engine: Engine) -> None:
    for text in ("abcd", "abce", "axyz", "ab", "axym"):
        store(engine, text)
    assert hit(engine, "abcx") == (0, 3)
    assert hit(engine, "abx") == (0, 2)
    assert hit(engine, "axyx") == (0, 3)
    assert hit(engine, "axx") == (0, 2)
    assert hit(engine, "b") == (0, 0)


def test_every_group_must_have_the_blocks(rig: Rig) -> None:
    e = rig.engine(layout=full(4, 4))
    store(e, "abcd", groups=3)
    store(e, "xy", groups=1)
    assert hit(e, "abx") == (0, 2)
    assert hit(e, "xy") == (0, 0)
    store(e, "xy", groups=3)
    found = lookup(e, "xy")
    assert (found.blocks, [len(s) for s in found.slots]) == (2, [1, 1])


@pytest.mark.parametrize("shape", [full(4, 8), full(16)], ids=["two block sizes", "one block"])
def test_without_one_block_size_hits_end_with_a_chunk(rig: Rig, shape: RankLayout) -> None:
    e = rig.engine(layout=shape)
    assert store(e, "abcdef", groups=1).chunks == (0,)
    assert lookup(e, "abcdef").blocks == 0


def test_eviction_takes_a_tail_before_its_prefix_and_forgets_its_blocks(rig: Rig) -> None:
    rig = Rig(pages=16, extent=1)
    e = rig.engine(layout=full(4))
    store(e, "abcdef")
    for name in "0123456789ABC":
        store(e, name * BLOCKS)
    assert rig.count("evicted_capacity") == 0
    for text in ("D" * BLOCKS, "E" * BLOCKS):
        store(e, text)
    assert hit(e, "abcdef") == (1, 0)
    store(e, "F" * BLOCKS)


def test_a_hit_keeps_the_row_that_it_uses_in_part(rig: Rig) -> None:
    rig = Rig(pages=16, extent=1)
    e = rig.engine(layout=full(4))
    store(e, "abcd")
    for number in range(40):
        store(e, chr(200 + number) * BLOCKS)
        assert hit(e, "abx") == (0, 2)


def test_a_clear_forgets_blocks(rig: Rig, engine: Engine) -> None:
    store(engine, "abcdef")
    assert engine.clear() == 2
    assert hit(engine, "abcdef") == (0, 0)
    store(engine, "ab")
    assert hit(engine, "abcd") == (0, 2)


def test_a_late_tail_is_quarantined_and_never_found(rig: Rig, engine: Engine) -> None:
    grant = reserve(engine, "ab")
    engine.hand_over(reservations=(grant.reservation,))
    rig.wait(100)
    assert rig.gauge("quarantined_bytes")[0] == PAGE
    engine.commit(grant.reservation)
    assert hit(engine, "ab") == (0, 0)
    assert rig.gauge("quarantined_bytes") == (0,)


@pytest.mark.parametrize("blocks", [b"x", digests(*"abcd"), digests(*"abcdefgh")])
def test_what_cannot_be_the_blocks_is_refused(rig: Rig, engine: Engine, blocks: bytes) -> None:
    asked = m.Lookup(seq=7, request="r", digests=b"", width=WIDTH, blocks=blocks)
    assert rig.code(engine.scheduler, asked) == "bad_value"
    asked = m.Lookup(seq=7, request="r", digests=b"", width=WIDTH, first_blocks=blocks)
    assert rig.code(engine.scheduler, asked) == "bad_value"
    item = m.ReserveItem("r", digests("abcd", "efgh", "ijkl"), blocks=blocks)
    reply = rig.ask(engine.scheduler, m.Reserve(seq=8, items=[item], width=WIDTH))
    assert reply.grants[0].error
    assert rig.gauge("rows", "leases", "reservations") == (0, 0, 0)


def test_what_is_asked_again_is_counted_once(rig: Rig, engine: Engine) -> None:
    store(engine, "abcdefgh")
    assert hit(engine, "abcdexyz") == (1, 1)
    (ns,) = rig.status["namespaces"]
    assert (ns["lookups"], ns["lookup_tokens"], ns["hit_tokens"]) == (1, 36, 20)
    assert (rig.count("lookups"), rig.count("lookup_chunks")) == (1, 2)
    assert (rig.count("hit_chunks"), rig.count("hit_blocks")) == (1, 1)
    assert {"hit_blocks", "tails_granted", "tails_replaced"} <= COUNTERS.keys()


def test_a_hostile_reserve_of_rows_that_begin_alike_stays_consistent(engine: Engine) -> None:
    """Hashes that no engine has: equal first blocks under all chunks."""
    names = [f"c{i}" for i in range(40)]
    blocks = digests(*(x for name in names for x in ("same", "b", "c", name)))
    for _ in range(2):
        grant = engine.reserve(*names, blocks=blocks)
        if grant.reservation:
            engine.commit(grant.reservation)
    assert engine.lookup("c0", blocks=digests("same", "b")).blocks == 2


def test_a_row_from_a_tier_is_used_whole_only_and_a_tail_goes_to_none() -> None:
    rig = TierRig()
    e = rig.ready(layout=full(4))
    for text in ("abcdef", "abcdefgh", "abcdefghx"):
        store(e, text)
        rig.answer_all()
    assert len(rig.shelves[0]) == 2
    rig.forget_l1()
    store(e, "abcdefgX")
    p = Prompt("abcdefg")
    (found,) = rig.look_up(e, *p.chunks, blocks=digests(*p.rest))
    assert (found.chunks, found.blocks) == (1, 3), "a chunk of the tier, and blocks of L1"
    rig.forget_l1()
    (found,) = rig.look_up(e, *p.chunks, blocks=digests(*p.rest))
    assert (found.chunks, found.blocks) == (1, 0)


def test_a_daemon_that_stops_stores_no_tail() -> None:
    rig = TierRig(core={"flush": "on_evict"})
    e = rig.ready(layout=full(4))
    store(e, "abcdef")
    rig.step(Stopping())
    rig.answer_all()
    assert len(rig.shelves[0]) == 1


def test_of_many_layer_groups_no_blocks_after_the_chunks_that_are_looked_at() -> None:
    """A message of 16 keys names 2 chunks of 8 groups."""
    rig = Rig(256, keys_per_message=16)
    e = rig.engine(layout=full(*[4] * 8), chunk_tokens=16)
    assert store(e, "abcdefghijk", groups=255).chunks == (0, 1)
    assert rig.count("tails_granted") == 0
    assert hit(e, "abcdefghijk") == (2, 0)
    assert hit(e, "abcdefgX") == (1, 3)
    known = Prompt("abcdefg")
    again = [*Prompt("abcdefgh").chunks, "another"]
    found = e.lookup(*again, blocks=digests(*known.rest))
    assert (found.chunks, found.blocks) == (2, 0), "its blocks are those of the fourth chunk"
