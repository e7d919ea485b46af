"""A worker: its arena, boot by boot, and its debts."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvass.arena import memory
from kvass.arena.memory import Arena
from kvass.client import connection as connection_module
from kvass.client.worker import ArenaLease, WorkerClient
from kvass.messages import (
    DRAINED,
    Abort,
    Commit,
    Drained,
    Hello,
    Ping,
    Populated,
    Register,
    Release,
    Welcome,
)
from kvass.types import PAGE
from tests.support.waiting import eventually
from tests.support.wire.scripted_daemon import ARENA_BYTES, ScriptedDaemon

SLICE = 16 << 10


@pytest.fixture
def worker(daemon: ScriptedDaemon, worker_registration: Register) -> Iterator[WorkerClient]:
    client = WorkerClient(daemon.path, worker_registration)
    client.connect(5)
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
    lease = arena_of(worker, daemon.boot)
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


def test_what_is_given_back_before_the_connection_is_known_is_said_on_it(
    daemon: ScriptedDaemon, worker_registration: Register
) -> None:
    """Nothing of another boot is. What was committed then was not written, and is not said."""
    client = WorkerClient(daemon.path, worker_registration, incomplete=True)
    client.release(daemon.boot, 3)
    client.release(b"another boot 16b", 4)
    client.abort(daemon.boot, 2)
    client.commit(daemon.boot, 1)
    client.complete({})
    assert daemon.got(Release) == [Release(boot=daemon.boot, lease=3, rank=0)]
    assert daemon.got(Abort) == [Abort(boot=daemon.boot, reservation=2, rank=0)]
    client.connect(5)
    client.call(Ping())
    assert daemon.got(Commit, 0) == []
    assert len(daemon.got(Release)) == 1
    client.close()


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SLICE_BYTES", SLICE)


def populated(client: WorkerClient) -> int:
    """Bytes of its arena that this process has in its page tables (``smaps``, proc(5))."""
    connection = client.connection
    assert connection is not None
    assert connection.arena is not None
    begins = f"{connection.arena.buffer.ctypes.data:x}-"
    mapping = Path("/proc/self/smaps").read_text().split("\n" + begins)[1]
    (line,) = [x for x in mapping.split("VmFlags")[0].splitlines() if x.startswith("Rss:")]
    return int(line.split()[1]) << 10


def test_a_lease_says_how_much_the_daemon_has_populated(
    daemon: ScriptedDaemon, worker: WorkerClient
) -> None:
    def now() -> int:
        lease = arena_of(worker, daemon.boot)
        lease.close()
        return lease.populated

    assert now() == ARENA_BYTES // 2
    daemon.push(Populated(bytes=ARENA_BYTES // 2 + SLICE))
    assert eventually(lambda: now() == ARENA_BYTES // 2 + SLICE)
    daemon.push(Populated(bytes=1 << 50))  # a lie is no more than all of it
    assert eventually(lambda: now() == ARENA_BYTES)


def test_a_lease_has_memory_for_what_the_daemon_has_not_populated(
    daemon: ScriptedDaemon, worker: WorkerClient
) -> None:
    lease = arena_of(worker, daemon.boot)
    before = os.fstat(daemon._arena.fileno()).st_blocks
    lease.prepare(ARENA_BYTES - 2 * PAGE, ARENA_BYTES)
    assert os.fstat(daemon._arena.fileno()).st_blocks - before == 2 * PAGE // 512
    lease.close()


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
def test_a_rank_of_several_shards_populates_what_its_copies_touch(
    daemon: ScriptedDaemon, worker_registration: Register
) -> None:
    """Most of the arena is other ranks'."""
    worker = WorkerClient(daemon.path, msgspec.structs.replace(worker_registration, world_size=2))
    worker.start()
    with arena_of(worker, daemon.boot) as buffer:
        daemon.push(Populated(bytes=ARENA_BYTES))
        worker.call(Ping())
        buffer[: 2 * SLICE] = 0
        assert populated(worker) == 2 * SLICE
        del buffer
    worker.close()


def test_running_copies_finish_on_the_old_arena(
    daemon: ScriptedDaemon, worker: WorkerClient
) -> None:
    before = mapped()
    old = daemon.boot
    first, second = arena_of(worker, old), arena_of(worker, old)
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


def test_drained_is_said_once_the_copies_of_before_have_ended(
    daemon: ScriptedDaemon, worker: WorkerClient
) -> None:
    daemon.welcome = knows_drained
    daemon.restart()
    assert len(daemon.got(Drained)) == 1, "there was no copy, so at once"
    first, second = arena_of(worker, daemon.boot), arena_of(worker, daemon.boot)
    for _ in range(2):  # whatever comes in between
        daemon.restart()
        arena_of(worker, daemon.boot).close()
    first.close()
    worker.call(Ping())
    assert len(daemon.got(Drained)) == 1, "one copy is still under way"
    second.close()
    assert len(daemon.got(Drained, 2)) == 2
    worker.call(Ping())
    assert len(daemon.got(Drained)) == 2, "once a connection"


def test_an_older_daemon_is_not_told_that_it_is_drained(
    daemon: ScriptedDaemon, worker: WorkerClient
) -> None:
    daemon.restart()
    arena_of(worker, daemon.boot).close()
    worker.call(Ping())
    assert not [m for m in daemon.received if isinstance(m, Drained)]


def knows_drained(welcome: Welcome) -> Welcome:
    return msgspec.structs.replace(welcome, features=(DRAINED,))


@pytest.mark.parametrize("who", ["daemon", "worker"])
def test_eof_waits_for_the_last_copy(
    daemon: ScriptedDaemon, worker: WorkerClient, who: str
) -> None:
    lease = arena_of(worker, daemon.boot)
    if who == "daemon":
        daemon.half_close()  # "we are done with you, once you stop writing"
        assert eventually(lambda: not worker.connected or len(daemon.got(Hello)) > 1)
    else:
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
    monkeypatch.setattr(connection_module, "AT_ONCE_BYTES", 0)
    unmaps, goes_on, close = threading.Event(), threading.Event(), Arena.close

    def slow(arena: Arena) -> None:
        unmaps.set()
        goes_on.wait(60)
        close(arena)

    lease = arena_of(worker, daemon.boot)
    before = mapped()
    monkeypatch.setattr(Arena, "close", slow)
    daemon.restart()
    lease.close()
    assert unmaps.wait(10)
    assert arena_of(worker, daemon.boot), "the daemon that came after it is there"
    assert mapped() == before + 1
    goes_on.set()
    assert eventually(lambda: mapped() == before)
