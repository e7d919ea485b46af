"""CudaMover over the hostile fake: seeded histories, planted breaks, and its threads and errors."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from kvass.errors import UsageError
from kvass.layout.copy_plan import CopyPlan, plan_copy
from kvass.layout.describe import GroupPlanes, Plane
from kvass.transfer import cuda
from kvass.transfer.base import Done, Job, U8Array
from kvass.transfer.cuda import CudaMover
from kvass.transfer.lanes import FLYING_RUNS
from kvass.transfer.runtime import Fault, Region, Stream
from tests.support.gpu.fake_cuda import FakeCuda
from tests.support.waiting import eventually
from tests.transfer.cuda_mutants import (
    MUTANTS,
    UNBROKEN,
    Mutant,
    StaleMutantError,
    broken_copy,
    notice,
)
from tests.transfer.gpu_world import run_seed

PLANES = GroupPlanes(0, (Plane(0, 4096, 4096),), blocks=64, chunk_blocks=1)
SLOT = PLANES.shard_bytes


@pytest.mark.parametrize("first", range(0, 600, 100))
def test_seeded_histories(first: int) -> None:
    assert [told for seed in range(first, first + 100) if (told := run_seed(seed))] == []


@pytest.mark.parametrize("careless", ["store", "load"])
def test_hooks_in_the_wrong_order_are_noticed(careless: str) -> None:
    """The copies' place is where ``submit`` is called: before the drafter, or before vLLM zeroes
    new blocks, is too early. vLLM 0.32 calls ``wait_for_save`` after its drafter in both runners,
    and ``start_load_kv`` after zeroing."""
    wrong = [told for seed in range(80) if (told := run_seed(seed, careless))]
    assert len(wrong) > 10
    assert any(f"a {careless} is done, and the bytes are wrong" in told for told in wrong)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name.replace(" ", "-"))
def test_every_break_is_noticed(mutant: Mutant, tmp_path: Path) -> None:
    assert notice(broken_copy(mutant, tmp_path)), f"nothing notices: {mutant.name}"


def test_an_unbroken_copy_is_not_blamed(tmp_path: Path) -> None:
    assert notice(broken_copy(UNBROKEN, tmp_path), 50) == ""


def test_a_break_that_does_not_apply_any_more_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StaleMutantError, match="found 0 times"):
        broken_copy(Mutant("stale", "cuda.py", "no such text", ""), tmp_path)


# ------------------------------------------------------------ with its thread


class Rig:
    """A mover with a thread, and a device that works when it is asked whether it has."""

    def __init__(self, **more: Any) -> None:
        self.fake = FakeCuda(1)
        region, self.memory = self.fake.allocate(64 * 4096)
        self.memory[:] = np.repeat(np.arange(64, dtype=np.uint8), 4096)
        self.arena = self.fake.map(64 * SLOT)
        self.now = 100.0
        self.mover = CudaMover(self.fake, [region], [PLANES], clock=lambda: self.now, **more)

    def submit(self, kind: Literal["store", "load"], *blocks: int, **more: Any) -> None:
        self.mover.submit(Job(kind, (plan(*blocks),), self.arena, name=blocks, **more))

    def ends(self) -> dict[object, str]:
        return {done.job.name: done.outcome for done in self.mover.poll()}


def plan(*blocks: int) -> CopyPlan:
    return plan_copy(PLANES, [[b] for b in blocks], [SLOT * b for b in blocks])


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.fake.stopped = False
    rig.mover.close()
    assert rig.fake.violations == []
    given_up = rig.fake.dead or rig.mover._dead
    assert given_up or not rig.fake.registered


def test_submit_does_not_wait_for_the_engines_stream(rig: Rig) -> None:
    ran = threading.Event()

    def forward() -> None:
        rig.memory[4096:8192] = 77
        ran.set()

    rig.fake.stopped = True
    rig.fake.queue(forward)
    with rig.fake.engine_thread():
        rig.submit("store", 1)
    assert not rig.mover.drain(0.05)
    assert not ran.is_set()
    rig.fake.stopped = False
    assert rig.mover.drain(10)
    assert rig.ends() == {(1,): "done"}
    assert rig.arena[SLOT] == 77


def test_both_directions_and_many_jobs(rig: Rig) -> None:
    rig.arena[SLOT * 40 :] = 9
    for block in range(1, 30):
        rig.submit("store", block)
        rig.submit("load", block + 32)
    assert rig.mover.drain(10)
    assert set(rig.ends().values()) == {"done"}
    assert [rig.arena[SLOT * b] for b in range(1, 30)] == list(range(1, 30))
    assert rig.memory[45 * 4096] == 9


def test_a_load_that_ends_late_is_late(rig: Rig) -> None:
    rig.fake.stopped = True
    rig.submit("load", 1, deadline_s=rig.now + 1)
    assert eventually(lambda: bool(rig.fake.copied))
    rig.now += 1
    assert not rig.mover.drain(0.02), "its copy may still write"
    rig.fake.stopped = False
    assert rig.mover.drain(10)
    assert rig.ends() == {(1,): "late"}


def test_past_its_deadline_a_job_touches_nothing(rig: Rig) -> None:
    rig.submit("store", 1, deadline_s=rig.now)
    assert rig.mover.drain(10)
    assert rig.ends() == {(1,): "late"}
    assert rig.fake.copied == []


def test_registration_refused_is_one_warning_and_right(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.fake.plans.fail["register"] = {0, 1, 2}
    with caplog.at_level(logging.WARNING):
        rig.submit("store", 1, 2)
        rig.submit("store", 3)
        assert rig.mover.drain(10)
    assert set(rig.ends().values()) == {"done"}
    assert [batch.way for batch in rig.fake.copied] == ["pageable"] * len(rig.fake.copied)
    assert rig.arena[SLOT * 3] == 3
    assert len([r for r in caplog.records if "could not pin" in r.message]) == 1


def test_what_has_no_memory_yet_is_not_pinned(caplog: pytest.LogCaptureFixture) -> None:
    """Pinning would fault it in: charged to the worker, and waited for. Copies are right meanwhile,
    nothing is said of it, and it is pinned once the daemon has populated it."""
    rig = Rig(window=8 * SLOT)
    window = 8 * SLOT
    with caplog.at_level(logging.WARNING):
        for populated, ways in (
            (0, {"pageable"}),
            (window - 1, {"pageable"}),
            (window, {"pageable", "dma"}),
            (2 * window, {"dma"}),
            (0, {"dma"}),
        ):
            rig.fake.copied.clear()
            rig.submit("store", 3, 12, populated=populated)
            assert rig.mover.drain(10)
            assert {batch.way for batch in rig.fake.copied} == ways
    assert set(rig.ends().values()) == {"done"}
    assert (rig.arena[SLOT * 3], rig.arena[SLOT * 12]) == (3, 12)
    assert caplog.records == []
    rig.mover.close()
    assert rig.fake.violations == []


def test_the_arenas_last_window_may_be_shorter() -> None:
    rig = Rig(window=48 * SLOT)
    rig.submit("store", 60, populated=64 * SLOT)
    assert rig.mover.drain(10)
    assert [batch.way for batch in rig.fake.copied] == ["dma"]
    rig.mover.close()


def test_a_job_pins_what_its_next_copies_touch_and_not_all_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that its first copies do not wait for its last."""
    rig = Rig(window=8 * SLOT)
    register, seen = rig.fake.register, []

    def count(address: int, size: int) -> Any:
        seen.append(len(rig.fake.copied))
        return register(address, size)

    monkeypatch.setattr(rig.fake, "register", count)
    many = [plan(*range(8 * n + 1, 8 * n + 5)) for n in range(8)]
    rig.mover.submit(Job("store", tuple(many), rig.arena))
    assert rig.mover.drain(10)
    assert len(seen) == 8
    assert seen == sorted(seen)
    assert seen[0] == 0
    assert seen[-1] > 0
    rig.mover.close()


def test_a_failed_copy_fails_its_job_only(rig: Rig) -> None:
    rig.fake.plans.fail["copy"] = {0}
    rig.submit("store", 1)
    assert rig.mover.drain(10)
    rig.submit("store", 2)
    assert rig.mover.drain(10)
    assert rig.ends() == {(1,): "failed", (2,): "done"}


def test_a_dead_device_loses_what_ran_and_fails_the_rest(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.fake.stopped = True
    rig.submit("store", 1)
    assert eventually(lambda: bool(rig.fake.copied))
    rig.fake.kill()
    assert rig.mover.drain(10)
    rig.submit("store", 2)
    assert rig.mover.drain(10)
    assert rig.ends() == {(1,): "lost", (2,): "failed"}
    assert any(arena is rig.arena for arena in cuda._lost)
    assert caplog.text.count("the GPU failed kvass") == 1


def test_close_gives_up_on_a_device_that_hangs(rig: Rig) -> None:
    rig.fake.stopped = True
    rig.submit("store", 1)
    assert eventually(lambda: bool(rig.fake.copied))
    closing = threading.Thread(target=rig.mover.close)
    closing.start()
    assert eventually(lambda: rig.mover._closed)
    time.sleep(0.01)
    assert closing.is_alive()
    rig.now += cuda.PATIENCE_S + 1
    closing.join(10)
    assert not closing.is_alive()
    assert rig.ends() == {(1,): "lost"}


def test_what_a_runtime_raises_ends_every_job_not_the_thread(
    rig: Rig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig.fake, "copy", raising)
    for block in (1, 2, 3):
        rig.submit("store", block)
    rig.submit("load", 40)
    assert rig.mover.drain(10)
    rig.submit("store", 4)
    assert rig.mover.drain(10)
    ends = rig.ends()
    assert len(ends) == 5
    assert set(ends.values()) == {"failed"}
    assert caplog.text.count("the copy thread failed") == 1


def raising(*_: object) -> Any:
    raise ValueError("not a value")


def test_what_was_given_before_we_failed_is_waited_for(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows how much of it the device was given; but when its stream is empty."""
    asked = threading.Event()
    idle = rig.fake.idle

    def noting(stream: Stream) -> bool | Fault:
        asked.set()
        return idle(stream)

    monkeypatch.setattr(rig.fake, "mark", raising)
    monkeypatch.setattr(rig.fake, "idle", noting)
    rig.fake.stopped = True
    rig.submit("store", 1)
    assert asked.wait(10)
    rig.submit("store", 2)
    assert eventually(lambda: (2,) in (ended := rig.ends()) and (1,) not in ended)
    rig.fake.stopped = False
    assert rig.mover.drain(10)
    assert rig.ends() == {(1,): "failed"}


def test_who_fails_twice_knows_nothing_any_more(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig.fake, "mark", raising)
    monkeypatch.setattr(rig.fake, "idle", raising)
    rig.submit("store", 1)
    assert rig.mover.drain(10)
    rig.submit("store", 2)
    assert rig.mover.drain(10)
    assert rig.ends() == {(1,): "lost", (2,): "failed"}


@pytest.mark.parametrize("call", ["forget"])
def test_what_raises_when_a_job_is_over_does_not_keep_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    rig.fake.plans.fail[f"{call} raises"] = {0, 1}
    for block in (1, 2, 3):
        rig.submit("store", block)
    assert rig.mover.drain(10)
    assert len(rig.ends()) == 3


@pytest.mark.parametrize("call", ["mark", "done"])
def test_a_device_that_cannot_say_what_is_done_is_asked_another_way(
    rig: Rig, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    """No event to be had (CUDA may be out of memory) is no reason to give blocks back too early,
    nor to give the device up: ``lost`` is for dead ones."""
    rig.fake.plans.fail[call] = set(range(1000))
    for block in (1, 2, 3):
        rig.submit("store", block)
    assert rig.mover.drain(10)
    # What an event says may be the copy's own error.
    assert set(rig.ends().values()) == {"done" if call == "mark" else "failed"}
    assert caplog.text.count("the GPU does not say what is copied") == 1


def test_a_device_that_says_nothing_for_long_is_given_up(rig: Rig) -> None:
    rig.fake.plans.fail |= {"mark": set(range(1000)), "idle": set(range(10**6))}
    rig.submit("store", 1)
    assert eventually(lambda: rig.fake.plans.calls.get("idle", 0) > 10)
    assert not rig.ends()
    rig.now += cuda.PATIENCE_S + 1
    assert rig.mover.drain(10)
    assert rig.ends() == {(1,): "lost"}


def test_each_silence_is_counted_from_its_own_beginning(rig: Rig) -> None:
    """... and each direction's: two hiccups an hour apart are no silence of an hour."""
    for block in (1, 2):
        calls = rig.fake.plans.calls
        rig.fake.plans.fail["done"] = {calls.get("done", 0)}
        rig.fake.plans.fail["idle"] = {calls.get("idle", 0)}
        rig.submit("store", block)
        assert rig.mover.drain(10)
        assert rig.ends() == {(block,): "failed"}
        rig.submit("store", 10 + block)
        assert rig.mover.drain(10)
        rig.now += 3600
        assert rig.ends() == {(10 + block,): "done"}


def test_of_what_we_failed_in_both_directions_are_seen_to(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One stream that is silent is not excused by another one, or by none."""
    monkeypatch.setattr(rig.fake, "mark", raising)
    monkeypatch.setattr(rig.fake, "idle", lambda stream: Fault("nothing to say"))
    rig.submit("store", 1)
    assert eventually(lambda: bool(rig.mover._broken))
    assert eventually(lambda: rig.mover._lanes["store"].silent_s is not None)
    rig.now += cuda.PATIENCE_S + 1
    assert rig.mover.drain(10)
    assert rig.ends() == {(1,): "lost"}


def test_close_ends_though_a_call_of_the_driver_never_returns(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "PATIENCE_S", 0.05)
    monkeypatch.setattr(cuda, "JOIN_S", 0.05)
    within, leave, copy = threading.Event(), threading.Event(), rig.fake.copy

    def hanging(*args: Any) -> Any:
        within.set()
        leave.wait(60)
        return copy(*args)

    monkeypatch.setattr(rig.fake, "copy", hanging)
    rig.submit("store", 1)
    assert within.wait(10)
    rig.submit("store", 2)
    closing = threading.Thread(target=rig.mover.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()
    assert rig.ends() == {(1,): "lost", (2,): "failed"}
    assert any(one is rig.mover for one in cuda._lost)
    leave.set()  # it returns after all, and nothing is settled twice
    assert rig.mover._thread is not None
    rig.mover._thread.join(10)
    assert not rig.mover._thread.is_alive()
    assert rig.ends() == {}


@pytest.mark.parametrize("call", ["register", "open_stream", "wait"])
def test_what_was_settled_is_not_given_when_a_call_returns_after_all(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """``close`` gave up on a call before the first copy and said ``failed``: by the time that it
    returns the slots are another's."""
    monkeypatch.setattr(cuda, "PATIENCE_S", 0.05)
    monkeypatch.setattr(cuda, "JOIN_S", 0.05)
    within, leave, real = threading.Event(), threading.Event(), getattr(rig.fake, call)

    def hanging(*args: Any) -> Any:
        within.set()
        leave.wait(60)
        return real(*args)

    monkeypatch.setattr(rig.fake, call, hanging)
    rig.submit("store", 1)
    assert within.wait(10)
    rig.mover.close()
    assert rig.ends() == {(1,): "failed"}
    leave.set()
    assert rig.mover._thread is not None
    rig.mover._thread.join(10)
    assert not rig.mover._thread.is_alive()
    assert rig.fake.copied == []
    rig.fake.dead = True


def test_what_a_dead_device_may_still_read_is_kept(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Table:
        pass

    tables, copy = list[weakref.ref[Table]](), rig.fake.copy

    def keeping(stream: Any, batch: Any) -> Any:
        table = Table()
        tables.append(weakref.ref(table))
        batch.keep.append(table)
        return copy(stream, batch)

    monkeypatch.setattr(rig.fake, "copy", keeping)
    rig.fake.stopped = True
    rig.submit("load", 1)
    assert eventually(lambda: bool(rig.fake.copied))
    rig.fake.kill()
    assert rig.mover.drain(10)
    assert rig.ends() == {(1,): "lost"}
    rig.fake.copied.clear()
    for ops in rig.fake.streams.values():
        ops.clear()
    gc.collect()
    assert tables
    assert all(table() is not None for table in tables)


def test_close_from_a_callback_is_misuse(rig: Rig) -> None:
    said: list[str] = []

    def on_done(done: Done) -> None:
        try:
            rig.mover.close()
        except UsageError as e:
            said.append(str(e))

    rig.submit("store", 1, on_done=on_done)
    assert rig.mover.drain(10)
    assert said == ["close() was called from on_done; call it from another thread"]


def test_a_raising_callback_costs_nobody_an_end(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    def on_done(done: Done) -> None:
        raise ValueError("mine")

    rig.submit("store", 1, on_done=on_done)
    rig.submit("store", 2)
    assert rig.mover.drain(10)
    assert rig.ends() == {(1,): "done", (2,): "done"}
    assert "on_done of job (1,)" in caplog.text


def test_a_job_without_rows_is_done(rig: Rig) -> None:
    rig.mover.submit(Job("load", (), rig.arena))
    assert rig.mover.drain(10)
    assert rig.ends() == {None: "done"}


def test_a_short_job_does_not_wait_for_a_long_one() -> None:
    rig = Rig(batch_bytes=1, flying_bytes=1)
    rig.fake.stopped = True
    rig.submit("load", *range(1, 40, 2))  # runs of their own
    assert eventually(lambda: bool(rig.fake.copied))
    rig.submit("load", 50)
    rig.fake.stopped = False
    assert rig.mover.drain(10)
    assert next(done.job.name for done in rig.mover.poll()) == (50,)
    rig.mover.close()
    assert rig.fake.violations == []


def test_a_row_moves_in_as_few_descriptors_as_it_has_runs() -> None:
    planes = GroupPlanes(0, (Plane(0, 64, 64), Plane(4096, 64, 64)), blocks=40, chunk_blocks=16)
    fake = FakeCuda(1)
    region, _ = fake.allocate(8192)
    mover = CudaMover(fake, [region], [planes])
    one = plan_copy(planes, [[*range(1, 9), *range(20, 28)]], [0])
    mover.submit(Job("store", (one,), fake.map(4096)))
    assert mover.drain(10)
    mover.close()
    assert [len(batch.bytes) for batch in fake.copied] == [4]


def test_what_flies_is_bounded_in_descriptors_for_each_direction() -> None:
    """Behind an engine that is busy: a driver may keep who gives it more than a stream takes."""
    planes = GroupPlanes(0, (Plane(0, 64, 64),), blocks=40_000, chunk_blocks=100)
    fake = FakeCuda(1, eager=4000)
    region, _ = fake.allocate(64 * 40_000)
    tables = [np.arange(start, start + 19_800, 2).reshape(-1, 100) for start in (1, 20_000)]
    mover = CudaMover(fake, [region], [planes])
    kinds: list[Literal["store", "load"]] = ["store", "load"]
    fake.stopped = True
    fake.queue(lambda: None)
    with fake.engine_thread():
        for kind, table in zip(kinds, tables, strict=True):
            slots = np.arange(len(table)) * planes.shard_bytes
            arena = fake.map(len(table) * planes.shard_bytes)
            mover.submit(Job(kind, (plan_copy(planes, table.tolist(), slots.tolist()),), arena))

    def given(kind: str) -> int:
        return sum(len(batch.bytes) for batch in list(fake.copied) if batch.kind == kind)

    for kind in kinds:  # two batches of at most 4,096, and no third
        assert eventually(lambda kind=kind: given(kind) > 4096)  # type: ignore[misc]
    assert not mover.drain(0.1)
    assert all(4096 < given(kind) <= FLYING_RUNS for kind in kinds)
    fake.stopped = False
    assert mover.drain(60)
    assert [given(kind) for kind in kinds] == [9900, 9900]
    mover.close()
    assert fake.violations == []


def test_a_call_that_may_block_waits_for_all_that_its_stream_waits_for(rig: Rig) -> None:
    """A smaller job, submitted later, overtook it: the stream waits for that one's place, too."""
    rig.fake.stopped = True
    rig.fake.queue(lambda: None)
    with rig.fake.engine_thread():
        rig.submit("store", 1, 3, 5, populated=0)
    assert eventually(lambda: bool(rig.fake.plans.calls.get("done"))), "asked for its turn"
    rig.fake.queue(lambda: None)
    with rig.fake.engine_thread():
        rig.submit("store", 7)
    assert eventually(lambda: bool(rig.fake.copied))
    rig.fake.queue(lambda: None)
    for _ in range(2):  # the engine comes to the first job's place, and not to the second's
        rig.fake.step()
    assert not rig.mover.drain(0.05)
    assert [batch.way for batch in rig.fake.copied] == ["dma"]
    rig.fake.stopped = False
    assert rig.mover.drain(10)
    assert [batch.way for batch in rig.fake.copied] == ["dma", "pageable"]
    assert set(rig.ends().values()) == {"done"}


def test_an_arenas_end_waits_for_the_driver_on_the_copy_thread() -> None:
    """Though the engine's thread be the last to use it; and the copy thread have nothing to do."""
    rig = Rig()
    rig.submit("store", 1)
    assert rig.mover.drain(10)
    assert rig.fake.registered
    with rig.fake.engine_thread():
        rig.mover.poll()
        del rig.arena
    assert eventually(lambda: not rig.fake.registered and not rig.fake.mapped)
    rig.mover.close()
    assert rig.fake.violations == []


def test_of_a_full_lane_of_a_dead_device_every_job_ends() -> None:
    rig = Rig(flying_bytes=1)
    rig.fake.stopped = True
    rig.submit("store", 1)
    assert eventually(lambda: bool(rig.fake.copied))
    rig.submit("store", 2)
    rig.fake.kill()
    assert rig.mover.drain(10)
    assert rig.ends() == {(1,): "lost", (2,): "failed"}
    rig.submit("store", 3)
    assert rig.mover.drain(10)
    assert rig.ends() == {(3,): "failed"}


def test_regions_on_two_devices_are_refused() -> None:
    with pytest.raises(UsageError, match="several devices"):
        CudaMover(FakeCuda(1), [Region(0, 1 << 20, 0), Region(1 << 30, 1 << 20, 1)], [PLANES])


def test_a_job_that_comes_while_the_mover_closes_is_refused_not_forgotten(rig: Rig) -> None:
    order = rig.fake.order

    def closing() -> Any:
        rig.mover.close()
        return order()

    rig.fake.order = closing  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="closed"):
        rig.submit("store", 1)
    assert rig.mover.drain(0)
    assert rig.fake.live_events == 0


def test_without_a_thread_a_job_is_refused_and_the_next_one_tries_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that may have no more threads for a while: nothing waits for ever."""

    def full(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", full)
        with pytest.raises(RuntimeError, match="new thread"):
            rig.submit("store", 1)
    assert rig.fake.live_events == 0, "its place in the engine's stream is forgotten"
    rig.submit("store", 2)
    assert rig.mover.drain(10)
    assert rig.ends() == {(2,): "done"}


def test_who_waits_for_the_engine_long_looks_less_often(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look takes the GIL; and once something is over, the next batch is soon over, too."""
    pauses, wait = list[float | None](), rig.mover._changed.wait

    def noted(timeout: float | None = None) -> bool:
        pauses.append(timeout)
        return wait(timeout)

    monkeypatch.setattr(rig.mover._changed, "wait", noted)
    rig.fake.stopped = True
    rig.submit("store", 1)
    assert eventually(lambda: len(pauses) > 5)
    assert set(pauses) <= {None, cuda.POLL_S}
    rig.now += 8 * 200e-6
    assert eventually(lambda: pytest.approx(200e-6) == pauses[-1])
    rig.now += 60
    assert eventually(lambda: pauses[-1] == cuda.LONGEST_POLL_S)
    rig.fake.stopped = False
    assert rig.mover.drain(10)
    rig.fake.stopped = True
    pauses.clear()
    rig.submit("store", 2)
    assert eventually(lambda: cuda.POLL_S in pauses)
    assert cuda.LONGEST_POLL_S not in pauses


def test_what_does_not_fit_is_refused(rig: Rig) -> None:
    cut: U8Array = rig.arena[:SLOT]
    with pytest.raises(UsageError, match="another boot"):
        rig.mover.submit(Job("store", (plan(1),), cut))
    rig.mover.close()
    with pytest.raises(UsageError, match="closed"):
        rig.submit("store", 1)
