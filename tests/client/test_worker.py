"""A worker: its arena, boot by boot, and its debts."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvass.arena.memory import Arena
from kvass.client import session as session_module
from kvass.client import worker as worker_module
from kvass.client.parallel import ParallelStrategy
from kvass.client.worker import ArenaLease, WorkerClient
from kvass.messages import Abort, Commit, Hello, Populated, Register, Release
from kvass.types import PAGE, GroupLayout, RankLayout, Slots
from tests.support.waiting import eventually
from tests.support.wire.scripted_daemon import ARENA_BYTES, ScriptedDaemon

SLICE = 16 << 10


@pytest.fixture
def worker(daemon: ScriptedDaemon, worker_registration: Register) -> Iterator[WorkerClient]:
    client = WorkerClient(daemon.path, worker_registration)
    client.start()
    assert eventually(lambda: client.connected)
    yield client
    client.close()


def mapped() -> int:
    """How many arenas this process has mapped."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("kvass-arena")


def arena_of(worker: WorkerClient, boot: bytes) -> ArenaLease:
    """That boot's arena, once connected to it.

    Polls the lease itself: ``connected`` and ``arena`` asked one after the other may be answers of
    two sessions.
    """
    leases: list[ArenaLease] = []

    def given() -> bool:
        lease = worker.arena(boot)
        leases.extend([] if lease is None else [lease])
        return lease is not None

    assert eventually(given)
    return leases[0]


def test_the_arena_of_this_boot_alone(daemon: ScriptedDaemon, worker: WorkerClient) -> None:
    assert worker.arena(b"another boot 16b") is None
    lease = worker.arena(daemon.boot)
    assert lease is not None
    assert lease.boot == daemon.boot
    with lease as buffer:
        assert buffer.shape == (ARENA_BYTES,)
        buffer[4096:4100] = 7
    assert daemon._arena.buffer[4096:4100].tolist() == [7] * 4
    assert lease.buffer.size == 0
    lease.close()  # idempotent


def test_debts_are_settled_by_rank(daemon: ScriptedDaemon, worker: WorkerClient) -> None:
    worker.commit(daemon.boot, 1)
    worker.abort(daemon.boot, 2)
    worker.release(daemon.boot, 3)
    worker.commit(b"another boot 16b", 4)
    assert daemon.got(Release) == [Release(boot=daemon.boot, lease=3, rank=0)]
    assert daemon.got(Commit) == [Commit(boot=daemon.boot, reservation=1, rank=0)]
    assert daemon.got(Abort) == [Abort(boot=daemon.boot, reservation=2, rank=0)]
    assert worker.counters["dropped"] == 1


def as_rank(world: ParallelStrategy, terms: Register, layout: RankLayout | None = None) -> Register:
    """``terms`` as a rank of ``world`` says them."""
    return world.register(
        terms.instance, terms.identity, terms.chunk_tokens, layout or terms.layout
    )


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "SLICE_BYTES", SLICE)
    monkeypatch.setattr(worker_module, "SLICE_BYTES", SLICE)


def populated(client: WorkerClient) -> int:
    """Bytes of its arena that this process has in its page tables (``smaps``, proc(5))."""
    session = client._client.session
    assert session is not None
    assert session.arena is not None
    begins = f"{session.arena.buffer.ctypes.data:x}-"
    mapping = Path("/proc/self/smaps").read_text().split("\n" + begins)[1]
    (line,) = [x for x in mapping.split("VmFlags")[0].splitlines() if x.startswith("Rss:")]
    return int(line.split()[1]) << 10


def slots_of(ranks: int, count: int) -> Slots:
    """The first ``count`` slots of an extent set that takes all of the arena."""
    bases = tuple(range(0, ARENA_BYTES, ARENA_BYTES // ranks))
    numbers = np.arange(count, dtype="<u4")
    return Slots(extents=(bases,), set_=bytes(2 * count), slot=numbers.tobytes())


def test_a_lease_says_how_much_the_daemon_has_populated(
    daemon: ScriptedDaemon, worker: WorkerClient
) -> None:
    def now() -> int:
        lease = worker.arena(daemon.boot)
        assert lease is not None
        lease.close()
        return lease.populated

    assert now() == ARENA_BYTES // 2
    daemon.push(Populated(bytes=ARENA_BYTES // 2 + SLICE))
    assert eventually(lambda: now() == ARENA_BYTES // 2 + SLICE)
    daemon.push(Populated(bytes=1 << 50))  # a lie is no more than all of it
    assert eventually(lambda: now() == ARENA_BYTES)


@pytest.mark.usefixtures("small_slices")
def test_populates_below_the_watermark(daemon: ScriptedDaemon, worker: WorkerClient) -> None:
    assert eventually(lambda: populated(worker) == ARENA_BYTES // 2)
    daemon.push(Populated(bytes=ARENA_BYTES // 2 + SLICE + 1))  # one more whole slice
    assert eventually(lambda: populated(worker) == ARENA_BYTES // 2 + SLICE)
    daemon.push(Populated(bytes=ARENA_BYTES))
    assert eventually(lambda: populated(worker) == ARENA_BYTES)
    daemon.push(Populated(bytes=1 << 50))  # a lie changes nothing
    worker.commit(daemon.boot, 1)
    daemon.got(Commit)
    assert worker.connected


@pytest.mark.usefixtures("small_slices")
def test_one_of_eight_shards_populates_what_its_copies_touch(
    daemon: ScriptedDaemon, worker_registration: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every shard is held by two ranks, so that no rank has the number of its shard."""
    populate, threads = Arena.populate, set[str]()

    def noting(arena: Arena, lo: int, hi: int) -> None:
        threads.add(threading.current_thread().name)
        populate(arena, lo, hi)

    monkeypatch.setattr(Arena, "populate", noting)
    share, shard = ARENA_BYTES // 8, 3
    shard_bytes = PAGE
    world = ParallelStrategy(16, 1, replicas=2, rank=7)
    assert (world.world_size, world.shard) == (8, shard)
    worker = WorkerClient(daemon.path, as_rank(world, worker_registration))
    worker.start()
    try:
        arena_of(worker, daemon.boot).close()
        daemon.push(Populated(bytes=ARENA_BYTES))
        touched = 2 * SLICE // shard_bytes - 1
        lease = worker.arena(daemon.boot, slots=[slots_of(8, touched)])
        assert lease is not None
        assert eventually(lambda: populated(worker) == 2 * SLICE), "slices, not rows"
        with lease as buffer:
            buffer[shard * share :][: 2 * SLICE] = 0
            assert populated(worker) == 2 * SLICE, "they are its own"
            buffer[: shard * share] = 0  # negative control: what is touched is counted
            assert populated(worker) == 2 * SLICE + shard * share
            del buffer
        outside = Slots(((1 << 40,) * 8, (-(1 << 40),) * 8), b"\0\0\1\0", bytes(8))
        lease = worker.arena(daemon.boot, slots=[outside])  # changes nothing
        assert lease is not None
        lease.close()
        lease = worker.arena(daemon.boot, slots=[slots_of(8, share // shard_bytes)])
        assert lease is not None
        assert eventually(lambda: populated(worker) == (shard + 1) * share)
        lease.close()
        assert threads == {"kvass"}, "the connection's thread alone"
    finally:
        worker.close()


@pytest.mark.usefixtures("small_slices")
def test_of_a_shard_of_several_slices_all_are_populated(
    daemon: ScriptedDaemon, worker_registration: Register
) -> None:
    group = GroupLayout("full", 32, ("l0",), (5 * SLICE // 2 // 8,))
    assert group.shard_bytes(256) == 5 * SLICE // 2
    second = as_rank(ParallelStrategy(2, rank=1), worker_registration, RankLayout((group,)))
    worker = WorkerClient(daemon.path, second)
    worker.start()
    try:
        arena_of(worker, daemon.boot).close()
        daemon.push(Populated(bytes=ARENA_BYTES))
        for slots, slices in ((1, 3), (2, 5), (3, 8)):
            lease = worker.arena(daemon.boot, slots=[slots_of(2, slots)])
            assert lease is not None
            lease.close()
            assert eventually(lambda slices=slices: populated(worker) == slices * SLICE)  # type: ignore[misc]
    finally:
        worker.close()


def test_running_copies_finish_on_the_old_arena(
    daemon: ScriptedDaemon, worker: WorkerClient
) -> None:
    before = mapped()
    old = daemon.boot
    first, second = worker.arena(old), worker.arena(old)
    assert first is not None
    assert second is not None
    daemon.restart()
    fresh = arena_of(worker, daemon.boot)
    assert worker.arena(old) is None
    assert mapped() == before + 1
    with first as buffer:
        buffer[:] = 1
        del buffer
    assert mapped() == before + 1  # the second copy still runs
    with second as buffer:
        assert buffer[-1] == 1
        del buffer
    assert eventually(lambda: mapped() == before)
    with fresh as buffer:
        buffer[0] = 2
        del buffer


def test_eof_waits_for_the_last_copy(daemon: ScriptedDaemon, worker: WorkerClient) -> None:
    lease = worker.arena(daemon.boot)
    assert lease is not None
    daemon.half_close()  # "we are done with you, once you stop writing"
    assert eventually(lambda: not worker.connected or len(daemon.got(Hello)) > 1)
    assert daemon.eofs == 0
    lease.close()
    assert eventually(lambda: daemon.eofs == 1)


def test_close_waits_for_the_last_copy(daemon: ScriptedDaemon, worker: WorkerClient) -> None:
    lease = worker.arena(daemon.boot)
    assert lease is not None
    worker.close()
    assert worker.arena(daemon.boot) is None
    with lease as buffer:
        buffer[0] = 1
        assert daemon.eofs == 0
    assert eventually(lambda: daemon.eofs == 1)


def test_nothing_waits_for_an_absent_daemon(tmp_path: Path, worker_registration: Register) -> None:
    worker = WorkerClient(str(tmp_path / "none"), worker_registration)
    worker.start()
    assert worker.arena(b"b" * 16) is None
    worker.commit(b"b" * 16, 1)
    worker.release(b"b" * 16, 1)
    assert worker.counters["dropped"] == 2
    worker.close()


def test_who_leaves_last_does_not_wait_for_the_unmapping(
    daemon: ScriptedDaemon, worker: WorkerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.2 s a GiB: neither the thread that copies nor the one that connects anew has that long."""
    monkeypatch.setattr(session_module, "AT_ONCE_BYTES", 0)
    unmaps, goes_on, close = threading.Event(), threading.Event(), Arena.close

    def slow(arena: Arena) -> None:
        unmaps.set()
        goes_on.wait(60)
        close(arena)

    lease = worker.arena(daemon.boot)
    assert lease is not None
    before = mapped()
    monkeypatch.setattr(Arena, "close", slow)
    daemon.restart()
    lease.close()
    assert unmaps.wait(10)
    assert arena_of(worker, daemon.boot), "the daemon that came after it is there"
    assert mapped() == before + 1
    goes_on.set()
    assert eventually(lambda: mapped() == before)
