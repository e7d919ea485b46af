"""The verification of copies: what it compares and how often, and what a wrong byte leads to."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvass.engine.boundary import Boundary
from kvass.engine.memory import KVMemory
from kvass.engine.setup import Verification
from kvass.engine.verifier import EVERY_ON_DEVICE, FIRST, MOST_TRIES, Verifier
from kvass.layout.copy_plan import CopyPlan, plan_copy
from kvass.layout.describe import GroupPlanes, Plane
from kvass.transfer import pages as pages_module
from kvass.transfer.base import Job, Kind, Outcome, U8Array
from kvass.transfer.batch import Region
from kvass.transfer.host import HostMover
from kvass.types import GroupLayout, RankLayout

BLOCKS = 20
LAYOUT = RankLayout(
    (
        GroupLayout("full", 16, ("a", "b", "c"), (96, 96, 64)),
        GroupLayout("state", 16, ("s",), (300,)),
    )
)
PLANES = (
    # layers apart, layers inside of blocks, and gaps that belong to nobody
    GroupPlanes(0, (Plane(0, 96, 96), Plane(2000, 200, 96), Plane(2100, 200, 64, 1)), BLOCKS, 3),
    GroupPlanes(1, (Plane(7, 320, 300, 2),), BLOCKS, 1),
)
SIZE = 8000
USUAL = Verification()
TWO_ROWS = plan_copy(PLANES[0], [[1, 9, 3], [4, 2, 8]], [4096, 12288], skip=1, drop=1)
STATES = plan_copy(PLANES[1], [[12], [14]], [20480, 8192])
PLANS = TWO_ROWS, STATES


class Rank:
    """A mover and a verifier of pages with random bytes. ``torches``: read by torch."""

    def __init__(self, torches: bool, setting: Verification = USUAL, **fields: Any) -> None:
        rng = np.random.default_rng(3)
        self.regions = tuple(rng.integers(0, 256, SIZE, np.uint8) for _ in range(3))
        self.arena = rng.integers(0, 256, 32768, np.uint8)
        owners = tuple(torch.from_numpy(one).untyped_storage() for one in self.regions)
        memory = KVMemory(LAYOUT, PLANES, self.regions, owners if torches else (), **fields)
        self.boundary = Boundary()
        self.verifier = Verifier(memory, setting, self.boundary)
        self.mover = HostMover(self.regions, PLANES)
        self.holds = True
        _made.append(self)

    def run(
        self,
        kind: Kind,
        plans: tuple[CopyPlan, ...] = PLANS,
        damage: Callable[[], object] = lambda: None,
        left_s: float = 100.0,
    ) -> tuple[Outcome, str]:
        """Copy, ``damage``, verify; the job's end."""

        def verify(job: Job) -> tuple[Outcome, str]:
            damage()
            return self.verifier.check(job, lambda: self.holds)

        job = Job(kind, plans, self.arena, time.monotonic() + left_s, verify=verify)
        self.mover.submit(job)
        assert self.mover.drain(30)
        (done,) = self.mover.poll()
        return done.outcome, done.error

    def page(self, plane: Plane, block: int) -> U8Array:
        return self.regions[plane.region][plane.base + block * plane.block_stride :][: plane.run]


_made: list[Rank] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """Ends the threads of all movers."""
    yield
    while _made:
        _made.pop().mover.close()


@pytest.fixture(params=[True, False], ids=["torch", "numpy"])
def rank(request: pytest.FixtureRequest) -> Rank:
    return Rank(request.param)


@pytest.mark.parametrize("kind", ["store", "load"])
def test_equal_rows_are_counted(rank: Rank, kind: Kind) -> None:
    for _ in range(3):
        assert rank.run(kind) == ("done", "")
    assert rank.verifier.take_counts() == {"verified": 6}
    assert rank.verifier.take_counts() == {}


def flips(rank: Rank, group: int) -> Iterator[tuple[str, U8Array]]:
    """The name and the bytes of each page that a job copies of the first row of a group, and of the
    same page in L1."""
    planes, row = PLANES[group], PLANS[group].rows[0]
    for number, (plane, at) in enumerate(zip(planes.planes, planes.slot_offsets(), strict=True)):
        for page, block in enumerate(row.blocks.tolist(), row.first):
            begin = row.slot + at + page * plane.run
            yield f"plane {number}", rank.page(plane, block)
            yield f"plane {number}", rank.arena[begin : begin + plane.run]


@pytest.mark.parametrize("kind", ["store", "load"])
@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("way", ["torch", "as on a device", "numpy"])
def test_one_flipped_byte_anywhere_is_found(
    way: str, kind: Kind, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torches = way != "numpy"
    if way == "as on a device":  # with a stream, and by torch alone
        monkeypatch.setattr(pages_module, "HOST", ())
    monkeypatch.setattr(pages_module, "BATCH_BYTES", 100)  # some pages are read one by one
    for number in range(len([*flips(Rank(torches), group)])):
        for at in (0, -1):
            rank = Rank(torches)
            where, page = [*flips(rank, group)][number]

            def flip(page: U8Array = page, at: int = at) -> None:
                page[at] ^= 1

            outcome, line = rank.run(kind, damage=flip)
            assert (outcome, where in line) == ("differs", True), (number, at, line)
            assert f"a {kind} in layer group {group} ({LAYOUT.groups[group].kind}, " in line
            assert rank.verifier.difference == line
            assert rank.verifier.take_counts()["verify_failed"] == 1
            other: Kind = "store" if kind == "load" else "load"
            assert rank.run(other)[0] == "failed", "nothing is trusted any more"


def test_the_line_says_what_is_expected_and_what_was_found(rank: Rank) -> None:
    plane, row = PLANES[0].planes[1], TWO_ROWS.rows[0]

    def flip() -> None:
        rank.page(plane, int(row.blocks[1]))[5] ^= 1

    _, line = rank.run("load", damage=flip)
    at = 3 * 96 + 2 * 96 + 5
    l1 = int(rank.arena[row.slot + at])
    assert line == (
        "a load in layer group 0 (full, blocks of 16 tokens, runs per block: 2 of 96 bytes, 1 of "
        f"64 bytes, 3 blocks per row) is wrong from byte {at} of its slot on: the block has "
        f"{l1 ^ 1:#04x}, not {l1:#04x} (plane 1, b)"
    )


@pytest.mark.parametrize("kind", ["store", "load"])
def test_what_no_copy_touches_is_not_compared(rank: Rank, kind: Kind) -> None:
    """Skipped and dropped blocks, gaps between pages, and the end of a slot."""

    def elsewhere() -> None:
        for plane in PLANES[0].planes:
            rank.page(plane, 1)[:] += 1  # skipped
            rank.page(plane, 8)[:] += 1  # dropped
        rank.arena[4096 : 4096 + 96] += 1  # where the skipped block would be
        rank.regions[0][2096] += 1
        for slot, planes in ((4096, PLANES[0]), (20480, PLANES[1])):
            used = planes.chunk_blocks * planes.block_bytes
            rank.arena[slot + used : slot + planes.shard_bytes] += 1

    for _ in range(2):
        assert rank.run(kind, damage=elsewhere) == ("done", "")
    assert rank.verifier.take_counts() == {"verified": 4}


def test_each_row_of_a_job_has_its_turn(rank: Rank) -> None:
    """A job's second row is not read at its first turn, but at the next one."""

    def flip() -> None:
        rank.page(PLANES[1].planes[0], 14)[0] ^= 1

    assert rank.run("store", damage=flip) == ("done", "")
    assert rank.run("store", damage=flip)[0] == "differs"


# ---------------------------------------------------------------- how often


def verified_of(rank: Rank, jobs: int, kind: Kind = "load") -> list[int]:
    """The numbers of those of so many jobs, from 1, of which rows were verified."""
    found = []
    for number in range(1, jobs + 1):
        assert rank.run(kind) == ("done", "")
        if rank.verifier.take_counts():
            found.append(number)
    return found


def test_the_first_rows_and_then_a_sample() -> None:
    first = [*range(1, FIRST + 1)]
    gpu: dict[str, Any] = {"gpu": (Region(0, SIZE),)}
    assert verified_of(Rank(False), 60) == first, "on a CPU no more"
    assert verified_of(Rank(False, Verification(every=0)), 60) == first
    assert verified_of(Rank(False, Verification(every=25)), 60) == [*first, 25, 50]
    assert verified_of(Rank(False, Verification(every=0), **gpu), 40) == first
    on_gpu = Rank(False, **gpu)
    assert verified_of(on_gpu, 40) == first
    on_gpu.verifier._jobs["load"] = EVERY_ON_DEVICE - 2
    assert verified_of(on_gpu, 3) == [2]


def test_each_kind_and_group_has_its_own_first_rows() -> None:
    rank = Rank(False)
    for plans in [(TWO_ROWS,)] * (FIRST + 4):
        rank.run("load", plans)
    assert rank.verifier.take_counts() == {"verified": FIRST}
    rank.run("load")
    assert rank.verifier.take_counts() == {"verified": 1}, "the other group's first one"
    rank.run("store")
    assert rank.verifier.take_counts() == {"verified": 2}


def test_a_trial_ends_after_so_many_equal_loads() -> None:
    trial = Verification(trial_every=10, trial_loads=FIRST + 2)
    first = [*range(1, FIRST + 1)]
    assert verified_of(Rank(False, trial), 70) == [*first, 20, 30]
    assert verified_of(Rank(False, trial), 70, "store") == [*first, *range(20, 71, 10)]
    more = Verification(4, trial_every=10, trial_loads=FIRST + 2)
    assert verified_of(Rank(False, more), 24) == [*first, 20, 24]


# ---------------------------------------------------------------- what proves nothing


@pytest.mark.parametrize("why", ["deadline", "session"])
def test_a_slot_that_may_be_anothers_proves_nothing(rank: Rank, why: str) -> None:
    def flip() -> None:
        if why == "deadline":
            time.sleep(0.3)
        rank.holds = why != "session"
        rank.arena[TWO_ROWS.rows[0].slot + 96] ^= 1

    assert rank.run("load", damage=flip, left_s=0.3) == ("late", "")
    assert not rank.verifier.difference
    assert rank.verifier.take_counts() == {}
    rank.holds = True
    assert rank.run("load") == ("done", "")


def test_rows_that_cannot_be_read_are_counted(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory left on the device")

    monkeypatch.setattr(pages_module.KVPages, "read", full)
    for _ in range(2):
        assert rank.run("store") == ("done", "")
    assert rank.verifier.take_counts() == Counter(not_verified=4)
    said = [r.getMessage() for r in caplog.records]
    assert said.count("a copy could not be verified: it counts as done") == 1
    assert len(said) == 2, "and the error"
    monkeypatch.undo()
    for _ in range(2 * FIRST):
        assert rank.run("store") == ("done", "")
    counts = rank.verifier.take_counts()
    assert counts == Counter(verified=2 * FIRST), "the first that can be read"


def test_what_can_never_be_read_is_not_tried_for_ever(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory left on the device")

    monkeypatch.setattr(pages_module.KVPages, "read", full)
    for _ in range(2 * MOST_TRIES):
        assert rank.run("store") == ("done", "")
    assert rank.verifier.take_counts() == Counter(not_verified=2 * MOST_TRIES)
