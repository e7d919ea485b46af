"""TierSuite passes the simplest right tier there is, and catches each way of being a wrong one."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvass.testing.tier_suite import SHAPES, MakeTier, TierSuite
from kvass.tiers.base import Shards, Tier, check_note
from tests.support.tiers.memory import Kept, MemoryTier


class TestMemory(TierSuite):
    @pytest.fixture
    def make_tier(self) -> MakeTier:
        kept = Kept()
        return lambda: MemoryTier(kept=kept)


class TestForgetful(TierSuite):
    persistent = False

    @pytest.fixture
    def make_tier(self) -> MakeTier:
        return MemoryTier


class Hasty(TierSuite):
    __test__ = False  # called below
    patience_s = 0.2


# ---------------------------------------------------------------- wrong ones


class ServesWhatIsAbsent(MemoryTier):
    def load_one(self, key: bytes, into: Shards) -> bool:
        return super().load_one(key, into) or key not in self.records


class ServesAPart(MemoryTier):
    def load_one(self, key: bytes, into: Shards) -> bool:
        for shard, raw in zip(into, self.records.get(key, []), strict=False):
            shard[: len(raw)] = np.frombuffer(raw[: len(shard)], np.uint8)
        return key in self.records


class ServesTheRightBytesAnywhere(MemoryTier):
    """Lengths that fit in sum are enough for it."""

    def load_one(self, key: bytes, into: Shards) -> bool:
        all_ = np.frombuffer(b"".join(self.records.get(key, [])), np.uint8)
        if key not in self.records or len(all_) != sum(map(len, into)):
            return False
        at = 0
        for shard in into:
            shard[:] = all_[at : at + len(shard)]
            at += len(shard)
        return True


class KeepsTheFirst(MemoryTier):
    def store_one(self, key: bytes, shards: Shards) -> None:
        if key not in self.records:
            super().store_one(key, shards)


class KeepsTheFirstOfABatch(MemoryTier):
    def store(self, keys: Sequence[bytes], data: Sequence[Shards]) -> list[bool]:
        return super().store(keys[::-1], data[::-1])


class KeepsTheCallersMemory(MemoryTier):
    def store_one(self, key: bytes, shards: Shards) -> None:
        self.records[key] = list(shards)


class AnswersInItsOwnOrder(MemoryTier):
    def load(self, keys: Sequence[bytes], into: Sequence[Shards]) -> list[bool]:
        return sorted(super().load(keys, into))


class WritesBesideTheBuffers(MemoryTier):
    def load_one(self, key: bytes, into: Shards) -> bool:
        found = super().load_one(key, into)
        for shard in into:
            if shard.base is not None and found:
                shard.base[-1] = 0
        return found


class CutsKeys(MemoryTier):
    def store_one(self, key: bytes, shards: Shards) -> None:
        super().store_one(key.rstrip(b"\0") or key, shards)

    def load_one(self, key: bytes, into: Shards) -> bool:
        return super().load_one(key.rstrip(b"\0") or key, into)


class NeverDeletes(MemoryTier):
    def delete(self, keys: Sequence[bytes]) -> None:
        self.check(keys)


class DeletesAll(MemoryTier):
    def delete(self, keys: Sequence[bytes]) -> None:
        self.check(keys)
        self.records.clear()


class NeverClears(MemoryTier):
    def clear(self) -> None: ...


class TakesAnything(MemoryTier):
    def check(self, keys: Sequence[bytes], data: Sequence[Shards] | None = None) -> None: ...


class NeverCloses(MemoryTier):
    def close(self) -> None: ...


class ClosesOverOthers(MemoryTier):
    def load_one(self, key: bytes, into: Shards) -> bool:
        time.sleep(0.02)
        return super().load_one(key, into) and not self.closed

    def close(self) -> None:
        self.closed = True


class RemembersWhatItServed(MemoryTier):
    """A cache of its own that a store does not void."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.served: dict[bytes, list[Any]] = {}

    def load_one(self, key: bytes, into: Shards) -> bool:
        held = self.served.setdefault(key, self.records.get(key, []))
        if key in self.records and [len(h) for h in held] == [len(s) for s in into]:
            for shard, raw in zip(into, held, strict=True):
                shard[:] = np.frombuffer(raw, np.uint8)
            return True
        return super().load_one(key, into)


class Tears(MemoryTier):
    """Writes in place and reads without a lock."""

    def store_one(self, key: bytes, shards: Shards) -> None:
        held = self.records.get(key)
        if held is None or [len(h) for h in held] != [len(s) for s in shards]:
            self.records[key] = [shard.copy() for shard in shards]
            return
        for mine, shard in zip(held, shards, strict=True):
            half = len(shard) // 2
            mine[:half] = shard[:half]
            time.sleep(0.0005)
            mine[half:] = shard[half:]

    def load(self, keys: Sequence[bytes], into: Sequence[Shards]) -> list[bool]:
        self.check(keys, into)
        with self.call("load"):
            pass
        return [self.load_one(key, shards) for key, shards in zip(keys, into, strict=True)]


class KeepsTheDeleted(MemoryTier):
    """Until somebody opens it again."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.hidden: set[bytes] = set()

    def probe(self, keys: Sequence[bytes]) -> list[bool]:
        found = zip(super().probe(keys), keys, strict=True)
        return [held and key not in self.hidden for held, key in found]

    def load_one(self, key: bytes, into: Shards) -> bool:
        return key not in self.hidden and super().load_one(key, into)

    def store_one(self, key: bytes, shards: Shards) -> None:
        self.hidden.discard(key)
        super().store_one(key, shards)

    def delete(self, keys: Sequence[bytes]) -> None:
        self.check(keys)
        with self.call("delete"):
            self.hidden |= set(keys)


class ForgetsNotes(MemoryTier):
    def clear(self) -> None:
        super().clear()
        self.notes.clear()


class KeepsNotesAsRecords(MemoryTier):
    def note(self, name: str) -> bytes | None:
        check_note(name)
        held = self.records.get(name.encode())
        return held[0] if held else None

    def set_note(self, name: str, value: bytes) -> None:
        check_note(name, value)
        self.store_one(name.encode(), [np.frombuffer(value, np.uint8)])


class KeepsTheFirstNote(MemoryTier):
    def set_note(self, name: str, value: bytes) -> None:
        if self.note(name) is None:
            super().set_note(name, value)


WRONG = [tier for tier in MemoryTier.__subclasses__() if tier.__module__ == __name__]


def failures(make: Callable[..., Tier]) -> list[str]:
    """The names of the suite's tests that do not pass, until the first."""
    suite = Hasty()
    for name, test in inspect.getmembers(suite, inspect.ismethod):
        wants = inspect.signature(test).parameters
        shapes = SHAPES.values() if "shape" in wants else [None]
        for shape in shapes if name.startswith("test_") else ():
            again = partial(make, kept=Kept())
            given = {"tier": again(), "make_tier": again, "shape": shape}
            given |= {"aligned": False, "later_s": 0.02}
            try:
                test(**{n: given[n] for n in wants})
            except (Exception, pytest.fail.Exception):  # noqa: BLE001  a test may fail in any way
                return [name]
    return []


def test_a_right_tier_fails_nothing() -> None:
    assert failures(MemoryTier) == []


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_a_wrong_tier_is_caught(wrong: Callable[..., Tier]) -> None:
    assert failures(wrong) != []
