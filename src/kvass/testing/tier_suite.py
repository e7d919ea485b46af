"""Tests that every tier must pass (``kvass.tiers.base``). The author of a tier subclasses them.

::

    class TestMyTier(TierSuite):
        @pytest.fixture
        def make_tier(self, tmp_path):
            return lambda: MyTier(tmp_path)

Every call of ``make_tier`` opens the same store, which is empty at first. The suite fails if a tier
evicts a record, so give the tier room for ``ROOM`` bytes.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, Final

import numpy as np
import pytest

from kvass.errors import UsageError
from kvass.tiers.base import (
    MAX_KEY_BYTES,
    MAX_NOTE_BYTES,
    MAX_SHARDS,
    Buffer,
    ProvingTier,
    Tier,
)
from kvass.types import PAGE

MakeTier = Callable[[], Tier]
ROOM: Final = 256 << 20
LARGE: Final = 3 << 20

SHAPES: Final = {
    "no shard": (),
    "an empty shard": (0,),
    "one byte": (1,),
    "one page": (PAGE,),
    "odd": (PAGE - 1, PAGE + 1),
    "mixed": (3 * PAGE, 0, 17, 2 * PAGE),
    "many": (1000,) * 16,
    "most": (64,) * MAX_SHARDS,
    "large": (LARGE, LARGE // 3),
}


def data_of(key: bytes, shape: tuple[int, ...], version: int = 0) -> list[Buffer]:
    """The shards of a record. Their bytes differ by key, version and place."""
    seed = hashlib.sha256(key + version.to_bytes(8, "little")).digest()
    made = np.random.default_rng(list(seed))
    return [made.integers(0, 256, n, dtype=np.uint8) for n in shape]


def room_for(shape: tuple[int, ...], aligned: bool = False) -> list[Buffer]:
    """Buffers to load into, filled with 0xA5."""
    made = []
    for n in shape:
        raw = np.full(n + 2 * PAGE, 0xA5, np.uint8)
        skip = -raw.ctypes.data % PAGE + (0 if aligned else 8)
        made.append(raw[skip : skip + n])
    return made


def aligned_copy(shards: list[Buffer]) -> list[Buffer]:
    copies = room_for(tuple(map(len, shards)), aligned=True)
    for copy, shard in zip(copies, shards, strict=True):
        copy[:] = shard
    return copies


def same(got: list[Buffer], want: list[Buffer]) -> bool:
    return [g.tobytes() for g in got] == [w.tobytes() for w in want]


def fetch(tier: Tier, key: bytes, shape: tuple[int, ...]) -> list[Buffer] | None:
    """Load one record. None if it is a miss."""
    into = room_for(shape)
    return into if tier.load([key], [into]) == [True] else None


def eventually(ask: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not ask():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.01)


class TierSuite:
    """The tests that every tier must pass; see the top of this file."""

    persistent: ClassVar[bool] = True
    """Whether records outlive ``close``."""

    patience_s: ClassVar[float] = 60.0
    """How long a tier that was opened again may take to find its records."""

    @pytest.fixture
    def tier(self, make_tier: MakeTier) -> Iterator[Tier]:
        opened = make_tier()
        yield opened
        opened.close()

    # ------------------------------------------------------------ round trips

    @pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
    @pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "anywhere"])
    def test_what_is_stored_comes_back(
        self, tier: Tier, shape: tuple[int, ...], aligned: bool
    ) -> None:
        want = data_of(b"key", shape)
        assert tier.store([b"key"], [aligned_copy(want) if aligned else want]) == [True]
        assert tier.probe([b"key"]) == [True]
        into = room_for(shape, aligned)
        assert tier.load([b"key"], [into]) == [True]
        assert same(into, want)

    def test_it_is_a_tier(self, tier: Tier) -> None:
        assert isinstance(tier, Tier)

    def test_a_check_finds_the_store_and_changes_nothing(self, tier: Tier) -> None:
        if isinstance(tier, ProvingTier):
            tier.check_store(False)  # before there is anything
        want = data_of(b"key", (99,))
        assert tier.store([b"key"], [want]) == [True]
        tier.set_note("epoch.a", b"note")
        if isinstance(tier, ProvingTier):
            for whole in (True, False, True):
                tier.check_store(whole)
        assert same(fetch(tier, b"key", (99,)) or [], want)
        assert tier.note("epoch.a") == b"note"

    def test_keys_are_any_bytes(self, tier: Tier) -> None:
        keys = [b"\0", b"\n", b" ", b"k", b"k\0", b"kk", bytes(range(256)), b"\xff" * MAX_KEY_BYTES]
        shape = (100, 5000)
        data = [data_of(key, shape) for key in keys]
        assert tier.store(keys, data) == [True] * len(keys)
        into = [room_for(shape) for _ in keys]
        assert tier.load(keys, into) == [True] * len(keys)
        assert all(same(got, want) for got, want in zip(into, data, strict=True))
        assert tier.probe([b"k\0\0", b"\0\0"]) == [False, False]

    def test_batches_answer_in_order_and_leave_out_what_is_missing(self, tier: Tier) -> None:
        keys = [b"record %d" % i for i in range(60)]
        shapes = [(17 * i, PAGE) for i in range(60)]
        data = [data_of(key, shape) for key, shape in zip(keys, shapes, strict=True)]
        held = [i % 3 != 1 for i in range(60)]
        stored = [i for i in range(60) if held[i]]
        assert all(tier.store([keys[i] for i in stored], [data[i] for i in stored]))
        assert tier.probe(keys) == held
        into = [room_for(shape) for shape in shapes]
        assert tier.load(keys, into) == held
        for i in stored:
            assert same(into[i], data[i])

    def test_an_empty_batch_is_nothing(self, tier: Tier) -> None:
        assert (tier.probe([]), tier.load([], []), tier.store([], [])) == ([], [], [])
        tier.delete([])

    def test_only_the_buffers_are_written(self, tier: Tier) -> None:
        shape = (1000, PAGE)
        assert tier.store([b"key"], [data_of(b"key", shape)]) == [True]
        around = np.full(8 * PAGE, 0x5A, np.uint8)
        into = [around[PAGE : PAGE + 1000], around[4 * PAGE : 5 * PAGE]]
        assert tier.load([b"key"], [into]) == [True]
        for gap in (around[:PAGE], around[PAGE + 1000 : 4 * PAGE], around[5 * PAGE :]):
            assert (gap == 0x5A).all()

    def test_the_caller_may_reuse_its_memory_at_once(self, tier: Tier) -> None:
        want = data_of(b"key", (5 * PAGE, 99))
        shards = aligned_copy(want)
        assert tier.store([b"key"], [shards]) == [True]
        for shard in shards:
            shard[:] = 0
        assert same(fetch(tier, b"key", (5 * PAGE, 99)) or [], want)

    def test_read_only_memory_can_be_stored(self, tier: Tier) -> None:
        shard = np.frombuffer(b"x" * 10_000, np.uint8)
        assert tier.store([b"key"], [[shard]]) == [True]
        assert same(fetch(tier, b"key", (10_000,)) or [], [shard])

    def test_other_lengths_are_a_miss(self, tier: Tier) -> None:
        want = data_of(b"key", (PAGE, 100))
        assert tier.store([b"key"], [want]) == [True]
        for other in [(PAGE,), (PAGE, 99), (PAGE, 101), (100, PAGE), (PAGE, 100, 0), (PAGE + 100,)]:
            assert fetch(tier, b"key", other) is None
        assert same(fetch(tier, b"key", (PAGE, 100)) or [], want)

    # ------------------------------------------------------------ replacing and forgetting

    def test_the_last_store_wins(self, tier: Tier) -> None:
        for version, shape in enumerate([(100,), (100,), (PAGE, PAGE), (3,)]):
            want = data_of(b"key", shape, version)
            assert tier.store([b"key"], [want]) == [True]
            assert same(fetch(tier, b"key", shape) or [], want)

    def test_of_duplicates_in_a_batch_the_last_wins(self, tier: Tier) -> None:
        shape = (PAGE, 33)
        keys = [b"a", b"b", b"a", b"a", b"b"]
        data = [data_of(key, shape, version) for version, key in enumerate(keys)]
        assert tier.store(keys, data) == [True] * 5
        into = [room_for(shape) for _ in keys]
        assert tier.load(keys, into) == [True] * 5
        for key, got in zip(keys, into, strict=True):
            assert same(got, data_of(key, shape, {b"a": 3, b"b": 4}[key]))

    def test_deleted_is_gone_and_can_be_stored_again(self, tier: Tier) -> None:
        shape = (5000,)
        keys = [b"a", b"b", b"c"]
        assert all(tier.store(keys, [data_of(key, shape) for key in keys]))
        tier.delete([b"a", b"absent", b"c", b"a"])
        assert tier.probe(keys) == [False, True, False]
        assert fetch(tier, b"a", shape) is None
        assert same(fetch(tier, b"b", shape) or [], data_of(b"b", shape))
        assert tier.store([b"a"], [data_of(b"a", shape, 1)]) == [True]
        assert same(fetch(tier, b"a", shape) or [], data_of(b"a", shape, 1))

    def test_clear_forgets_everything(self, tier: Tier) -> None:
        keys = [b"%d" % i for i in range(50)]
        assert all(tier.store(keys, [data_of(key, (1000,)) for key in keys]))
        tier.clear()
        assert not any(tier.probe(keys))
        assert fetch(tier, keys[0], (1000,)) is None
        assert tier.store(keys[:1], [data_of(keys[0], (1000,))]) == [True]
        tier.clear()
        tier.clear()

    # ------------------------------------------------------------ misuse and closing

    def test_misuse_is_refused_and_harms_nothing(self, tier: Tier) -> None:
        good = [np.zeros(8, np.uint8)]
        wrong: list[Buffer] = [np.zeros((2, 8), np.uint8)[:, 0]]
        assert tier.store([b"good"], [good]) == [True]
        for key in (b"", b"x" * (MAX_KEY_BYTES + 1)):
            for ask in (
                lambda key=key: tier.probe([key]),
                lambda key=key: tier.load([key], [good]),
                lambda key=key: tier.store([key], [good]),
                lambda key=key: tier.delete([key]),
            ):
                with pytest.raises(UsageError):
                    ask()
        for data in ([], [good, good], [wrong], [good * (MAX_SHARDS + 1)]):
            with pytest.raises(UsageError):
                tier.store([b"key"], data)
            with pytest.raises(UsageError):
                tier.load([b"key"], data)
        assert tier.probe([b"good", b"key"]) == [True, False]

    # ------------------------------------------------------------ notes

    def test_a_note_says_what_it_was_given_last(self, tier: Tier) -> None:
        assert tier.note("epoch.a") is None
        for value in (b"1", b"", bytes(range(256)) * (MAX_NOTE_BYTES // 256)):
            tier.set_note("epoch.a", value)
            tier.set_note("epoch.b", value + b"b"[: MAX_NOTE_BYTES - len(value)])
            assert tier.note("epoch.a") == value
        assert tier.note("epoch") is None

    def test_notes_are_no_records(self, tier: Tier) -> None:
        """A record and a note may have the same name; ``clear`` keeps notes."""
        tier.set_note("both", b"note")
        assert tier.probe([b"both"]) == [False]
        assert tier.store([b"both"], [data_of(b"both", (99,))]) == [True]
        tier.delete([b"both"])
        assert tier.note("both") == b"note"
        assert tier.store([b"both"], [data_of(b"both", (99,))]) == [True]
        tier.clear()
        assert tier.probe([b"both"]) == [False]
        assert tier.note("both") == b"note"

    def test_notes_nobody_may_ask_for(self, tier: Tier) -> None:
        for name in ("", "a" * 129, "../up", "a/b", "ä", ".hidden", "a b", "new\nline"):
            with pytest.raises(UsageError):
                tier.note(name)
            with pytest.raises(UsageError):
                tier.set_note(name, b"")
        with pytest.raises(UsageError):
            tier.set_note("long", bytes(MAX_NOTE_BYTES + 1))

    def test_notes_outlive_their_user(self, make_tier: MakeTier) -> None:
        tier = make_tier()
        tier.set_note("kept", b"old")
        tier.set_note("kept", b"new")
        tier.close()
        tier = make_tier()
        assert tier.note("kept") in ((b"new",) if self.persistent else (b"new", None))
        tier.close()

    # ------------------------------------------------------------ closing

    def test_closed_is_closed(self, make_tier: MakeTier) -> None:
        tier = make_tier()
        shard = [np.zeros(8, np.uint8)]
        tier.close()
        tier.close()
        for ask in (
            lambda: tier.probe([b"k"]),
            lambda: tier.load([b"k"], [shard]),
            lambda: tier.store([b"k"], [shard]),
            lambda: tier.delete([b"k"]),
            tier.clear,
            lambda: tier.note("n"),
            lambda: tier.set_note("n", b""),
        ):
            with pytest.raises(UsageError):
                ask()

    @pytest.mark.parametrize("later_s", [0.0, 0.001, 0.02])
    def test_closing_waits_for_what_runs(self, make_tier: MakeTier, later_s: float) -> None:
        """A load during a close succeeds or raises ``UsageError``; it is never a miss or wrong."""
        tier = make_tier()
        shape = (1 << 20,)
        keys = [b"%d" % i for i in range(8)]
        assert all(tier.store(keys, [data_of(key, shape) for key in keys]))
        reading = threading.Semaphore(0)

        def read() -> None:
            while True:
                into = [room_for(shape) for _ in keys]
                reading.release()
                try:
                    which = tier.load(keys, into)
                except UsageError:
                    return
                assert all(which)
                for key, got in zip(keys, into, strict=True):
                    assert same(got, data_of(key, shape))

        with ThreadPoolExecutor(3) as pool:
            readers = [pool.submit(read) for _ in range(3)]
            for _ in readers:
                reading.acquire()
            time.sleep(later_s)  # close at different moments of a load
            tier.close()
            for reader in readers:
                reader.result(timeout=60)

    # ------------------------------------------------------------ threads

    def test_threads_do_not_meet(self, tier: Tier) -> None:
        def work(me: int) -> None:
            for i in range(12):
                keys = [b"%d/%d/%d" % (me, i, k) for k in range(6)]
                shapes = [(1 + 977 * k, PAGE * (k % 3)) for k in range(6)]
                data = [data_of(key, shape) for key, shape in zip(keys, shapes, strict=True)]
                assert all(tier.store(keys, data))
                into = [room_for(shape) for shape in shapes]
                assert all(tier.load(keys, into))
                assert all(same(got, want) for got, want in zip(into, data, strict=True))
                tier.delete(keys[:3])
                assert tier.probe(keys) == [False] * 3 + [True] * 3

        with ThreadPoolExecutor(6) as pool:
            for done in [pool.submit(work, me) for me in range(6)]:
                done.result(timeout=120)

    def test_one_key_torn_by_many_is_never_mixed(self, tier: Tier) -> None:
        """Store, delete and load the same keys at once. Each load returns the record of one store.
        That store is not older than the last one that had ended when the load began."""
        shape = (40 * PAGE + 5, PAGE)
        keys = [b"hot 0", b"hot 1"]
        versions = {
            key: [data_of(key, shape, v) for v in range(4)] for key in keys
        }  # made beforehand, so that the race is in the tier
        ended = dict.fromkeys(keys, -1)
        begun = dict.fromkeys(keys, -1)
        hits = [0] * 4
        stop = threading.Event()

        def write(key: bytes) -> None:
            version = 0
            while version < 150 or (min(hits) < 5 and not stop.is_set()):
                begun[key] = version
                assert tier.store([key], [versions[key][version % 4]]) == [True]
                ended[key] = version
                if version % 10 == 9:
                    tier.delete([key])
                version += 1

        def read(me: int) -> None:
            key = keys[me % 2]
            try:
                while not stop.is_set():
                    first = ended[key]
                    got = fetch(tier, key, shape)
                    last = begun[key]
                    if got is not None:
                        may = {v % 4 for v in range(max(first, 0), last + 1)}
                        assert any(same(got, versions[key][v]) for v in may), (first, last)
                        hits[me] += 1
            finally:
                stop.set()  # end the others too after a failure

        with ThreadPoolExecutor(6) as pool:
            readers = [pool.submit(read, me) for me in range(4)]
            writers = [pool.submit(write, key) for key in keys]
            try:
                for writer in writers:
                    writer.result(timeout=120)
            finally:
                stop.set()
            for reader in readers:
                reader.result(timeout=60)
        assert min(hits) > 0, "nothing raced"

    # ------------------------------------------------------------ reopening

    def test_a_store_outlives_its_user(self, make_tier: MakeTier) -> None:
        shapes = {b"kept": (PAGE, 99), b"replaced": (PAGE, 99), b"other shape": (7,)}
        tier = make_tier()
        everything = [*shapes, b"deleted"]
        assert all(tier.store(everything, [data_of(key, (PAGE, 99)) for key in everything]))
        assert tier.store([b"replaced"], [data_of(b"replaced", (PAGE, 99), 1)]) == [True]
        assert tier.store([b"other shape"], [data_of(b"other shape", (7,), 1)]) == [True]
        tier.delete([b"deleted"])
        tier.close()
        tier = make_tier()
        if not self.persistent:  # then each record is a miss or right
            for key, shape in shapes.items():
                want = data_of(key, shape, 0 if key == b"kept" else 1)
                assert fetch(tier, key, shape) is None or same(fetch(tier, key, shape) or [], want)
            assert tier.probe([b"deleted"]) == [False]
            tier.close()
            return
        try:
            eventually(lambda: all(tier.probe(list(shapes))), self.patience_s)
            for key, shape in shapes.items():
                want = data_of(key, shape, 0 if key == b"kept" else 1)
                assert same(fetch(tier, key, shape) or [], want)
            assert tier.probe([b"deleted"]) == [False]
            tier.clear()
        finally:
            tier.close()
        tier = make_tier()
        assert not any(tier.probe(list(shapes)))
        tier.close()
