"""What the executor asks of a tier for each effect, and how that ends."""

from __future__ import annotations

import threading
import time

import numpy as np

from kvass.core.effects import (
    ENDS,
    Emptied,
    EpochIs,
    Loaded,
    Probed,
    Stored,
    TierClear,
    TierEpoch,
    TierLoad,
    TierProbe,
    TierStore,
    ToTier,
)
from kvass.daemon.tier_process.operations import OPERATIONS, StoreCheck
from kvass.types import Slots
from tests.daemon.tier_rig import (
    PAGE,
    SPACE,
    Rig,
    key,
    records,
    rig,
    slots,
)
from tests.support.tiers.memory import MemoryTier

# ---------------------------------------------------------------- what is asked of a tier


def test_bytes_go_from_slots_to_records_and_back() -> None:
    tier = MemoryTier()
    with rig(tier) as made:
        for page in (3, 5, 35, 37):
            made.arena[page * PAGE : (page + 1) * PAGE] = page
        stored = made.ask(TierStore(0, 1, records(10, 11), slots(3, 5), (PAGE, PAGE)))
        assert stored.which.tolist() == [True, True]
        assert tier.records == {
            key(10): [b"\3" * PAGE, b"\x23" * PAGE],
            key(11): [b"\5" * PAGE, b"\x25" * PAGE],
        }
        before = made.arena.copy()
        end = made.ask(TierLoad(0, 2, records(11, 99, 10), slots(8, 9, 10), (PAGE, PAGE)))
        assert type(end) is Loaded
        assert end.which.tolist() == [True, False, True]
        assert end.which.dtype == np.bool_
        for page, value in ((8, 5), (40, 37), (10, 3), (42, 35)):
            before[page * PAGE : (page + 1) * PAGE] = value
        assert (made.arena == before).all(), "exactly these slots"


def test_shards_of_different_sizes() -> None:
    tier = MemoryTier()
    with rig(tier) as made:
        made.arena[2 * PAGE : 4 * PAGE] = 7
        made.arena[21 * PAGE : 22 * PAGE] = 9
        where = Slots(extents=((0, 20 * PAGE),), set_=b"\0\0", slot=b"\1\0\0\0")
        assert made.ask(TierStore(0, 1, records(1), where, (2 * PAGE, PAGE))).which.all()
        assert tier.records[key(1)] == [b"\7" * 2 * PAGE, b"\x09" * PAGE]


def test_a_probe_of_several_batches_is_one_answer() -> None:
    tier = MemoryTier()
    tier.records = {key(1): [], key(2, group=4): []}
    with rig(tier) as made:
        end = made.ask(TierProbe(0, 5, (records(1, 2), records(), records(1, 2, group=4))))
        assert type(end) is Probed
        assert end.held.tolist() == [True, False, False, True]


def test_what_is_held_is_not_stored_again() -> None:
    tier = MemoryTier()
    tier.records = {key(2): [b"another daemon's"]}
    with rig(tier) as made:
        end = made.ask(TierStore(0, 1, records(1, 2, 3), slots(1, 2, 3), (PAGE, PAGE)))
        assert type(end) is Stored
        assert end.which.tolist() == [True, True, True]
        assert tier.records[key(2)] == [b"another daemon's"]
        assert tier.records.keys() == {key(1), key(2), key(3)}


def test_clear() -> None:
    tier = MemoryTier()
    tier.records = {key(1): []}
    with rig(tier) as made:
        assert made.ask(TierClear(0, 4)) == Emptied(4, True)
        assert tier.records == {}


def test_every_operation_is_carried_out_and_ends_as_its_kind_also_if_it_fails() -> None:
    where = slots(1)
    asked: list[ToTier] = [
        TierProbe(0, 1, (records(1),)),
        TierLoad(0, 2, records(1), where, (PAGE, PAGE)),
        TierStore(0, 3, records(1), where, (PAGE, PAGE)),
        TierEpoch(0, 4, SPACE, fresh=300),
        TierClear(0, 5),
    ]
    assert {*map(type, asked)} == ENDS.keys() == OPERATIONS.keys() - {StoreCheck}
    with rig(MemoryTier()) as made:
        for effect in asked:
            done, failed = made.ask(effect), effect.failed()
            assert type(done) is type(failed) is ENDS[type(effect)]
            assert done.op == failed.op == effect.op


# ---------------------------------------------------------------- epochs

NOTE = "epoch2." + SPACE.hex()


def told(made: Rig, asked: TierEpoch) -> int:
    """What the tier answers; its note says so, too."""
    end = made.ask(asked)
    assert isinstance(end, EpochIs)
    assert end.epoch is not None
    return end.epoch


def noted(epoch: int) -> dict[str, bytes]:
    return {NOTE: epoch.to_bytes(8, "big")}


def test_an_epoch_is_noted_once_and_then_found() -> None:
    tier = MemoryTier()
    with rig(tier) as made:
        first = told(made, TierEpoch(0, 1, SPACE, fresh=300))
        assert (first & 0xFFFFFFFF, tier.notes) == (300, noted(first))
        assert abs((first >> 32) - time.time()) < 600
        assert told(made, TierEpoch(0, 2, SPACE, fresh=400)) == first
        renewed = told(made, TierEpoch(0, 3, SPACE, fresh=200, renew=True))
        assert (renewed > first, tier.notes) == (True, noted(renewed))
        assert told(made, TierEpoch(0, 4, SPACE, fresh=600)) == renewed


def test_a_note_below_what_was_seen_is_set_again() -> None:
    tier = MemoryTier()
    with rig(tier) as made:
        first = told(made, TierEpoch(0, 1, SPACE, fresh=300))
        tier.notes |= noted(first - 1)
        assert told(made, TierEpoch(0, 2, SPACE, fresh=400, known=first)) == first
        assert tier.notes == noted(first)
        tier.notes.clear()
        assert told(made, TierEpoch(0, 3, SPACE, fresh=500, known=first)) == first
        assert tier.notes == noted(first)


def test_a_malformed_note_is_none() -> None:
    tier = MemoryTier()
    tier.notes[NOTE] = b"seven"
    with rig(tier) as made:
        assert told(made, TierEpoch(0, 1, SPACE, fresh=8)) & 0xFFFFFFFF == 8


def test_another_daemon_may_be_first() -> None:
    tier = MemoryTier()
    asked: list[str] = []

    def they_write_last(method: str) -> None:
        asked.append(method)
        if asked == ["note", "set_note", "note"]:
            tier.notes |= noted(77)

    tier.hook = they_write_last
    with rig(tier) as made:
        assert told(made, TierEpoch(0, 1, SPACE, fresh=8)) == 77


def test_notes_are_read_and_set_by_one_question_at_a_time() -> None:
    """A clear's question comes while another one is between reading the note and setting it."""
    tier = MemoryTier()
    reading, go_on = threading.Event(), threading.Event()

    def slow(method: str) -> None:
        if method == "set_note" and not reading.is_set():
            reading.set()
            assert go_on.wait(20)

    tier.hook = slow
    with rig(tier) as made:
        made.submit(TierEpoch(0, 1, SPACE, fresh=8, known=5 << 32))
        assert reading.wait(20)
        made.submit(TierEpoch(0, 2, SPACE, fresh=9, known=5 << 32, renew=True))
        go_on.set()
        assert made.end(1) == EpochIs(1, 5 << 32)
        renewed = made.end(2)
    assert isinstance(renewed, EpochIs)
    assert renewed.epoch is not None
    assert tier.notes == noted(renewed.epoch)


def test_a_tier_that_keeps_no_notes_has_no_epoch() -> None:
    tier = MemoryTier()
    tier.notes = Forgetful()
    with rig(tier) as made:
        assert made.ask(TierEpoch(0, 1, SPACE, fresh=8)) == EpochIs(1, None)


class Forgetful(dict[str, bytes]):
    def __setitem__(self, name: str, value: bytes) -> None:
        pass
