"""Segments over a real daemon: chunks found where they are not a prefix, and their right bytes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from kvass.client.scheduler import PENDING, SchedulerClient
from kvass.client.segments import SegmentClient
from kvass.messages import (
    FEATURES,
    FindSegments,
    FromClient,
    FromDaemon,
    IndexChunks,
    Register,
    Segment,
    Segments,
)
from kvass.testing.daemon import Daemon, running_daemon
from kvass.testing.fake_engine import WIDTH, FakeEngine, chunk_keys
from kvass.types import SCHEDULER
from tests.client.test_tiers import LARGE, engine, flushed, tiered
from tests.support.waiting import eventually
from tests.support.wire.scripted_daemon import Answer, ScriptedDaemon

TOKENS = 16
QUESTION = [7] * 5


def document(number: int, chunks: int = 4) -> list[int]:
    """Tokens that no other document has."""
    return [10_000 * number + i for i in range(chunks * TOKENS)]


def split(digests: bytes) -> list[bytes]:
    return [digests[at : at + WIDTH] for at in range(0, len(digests), WIDTH)]


def stored(one: FakeEngine, *numbers: int) -> None:
    for number in numbers:
        one.store(document(number))
        one.index(document(number))


def loaded(one: FakeEngine, prompt: list[int], prefix: int = 0) -> int:
    """Load what is found of ``prompt`` behind its first ``prefix`` chunks, with these, under one
    lease, and check every page; how many chunks came."""
    found = one.find(prompt, first=prefix * TOKENS)
    keys = chunk_keys(prompt, TOKENS)[:prefix] + split(found.digests)
    chunks = one.load_keys([*dict.fromkeys(keys)])
    one.verify()
    return chunks


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running_daemon(tmp_path_factory.mktemp("d"), "16MiB", lost_engine_grace_s=0.2) as real:
        yield real


def test_documents_in_another_order_are_found_and_loaded_under_one_lease(daemon: Daemon) -> None:
    with engine(daemon) as one:
        stored(one, 1, 2, 3)
        prompt = document(2) + QUESTION + document(3) + document(1) + QUESTION
        found = one.find(prompt, first=64)
        assert [(s.new_start, s.old_start, s.length) for s in found.segments] == [
            (69, 0, 64),
            (133, 0, 64),
        ]
        keys = chunk_keys(document(3), TOKENS) + chunk_keys(document(1), TOKENS)
        assert split(found.digests) == keys
        what = one.match_keys(chunk_keys(document(2), TOKENS) + keys)
        assert what is not None
        assert daemon.status()["leases"] == 1
        assert one.hand_over(what)
        one.copy(what)
        assert one.wait(what) == 12
        assert one.verify() > 0
        daemon.wait_until(leases=0, pins=0)


def test_a_chunk_that_stands_twice_is_loaded_once(daemon: Daemon) -> None:
    with engine(daemon) as one:
        stored(one, 1)
        prompt = QUESTION + document(1) + QUESTION + document(1)
        assert len(split(one.find(prompt).digests)) == 8
        assert loaded(one, prompt) == 4


def test_another_engine_of_the_namespace_finds_them_and_one_of_another_does_not(
    daemon: Daemon,
) -> None:
    with engine(daemon) as one, engine(daemon) as twin:
        stored(one, 1)
        assert loaded(twin, QUESTION + document(1)) == 4
        assert not twin.find(QUESTION + document(1), space=b"another user's salt").segments
        with engine(daemon, identity={"model": "other"}) as other:
            assert not other.find(QUESTION + document(1)).segments


def test_segments_are_promoted_from_a_disk_after_they_left_l1(tmp_path: Path) -> None:
    with tiered(tmp_path, "4MiB") as daemon, engine(daemon, model=LARGE) as one:
        for number in range(1, 9):  # twice what L1 holds
            stored(one, number)
            flushed(daemon)
        assert daemon.status()["rows"] < daemon.status()["indexed_chunks"] == 32
        assert loaded(one, document(2) + QUESTION + document(1)) == 8
        assert daemon.status()["counters"]["promoted_chunks"] >= 8
        daemon.wait_until(leases=0, pins=0)


def test_after_kill_9_of_an_engine_nothing_is_held_and_its_chunks_are_found(
    daemon: Daemon,
) -> None:
    """A process of its own holds a lease on segments when it is killed."""
    child = (
        "import sys, time\n"
        "from types import SimpleNamespace\n"
        "from tests.client.test_segments import *\n"
        "with engine(SimpleNamespace(socket=sys.argv[1])) as one:\n"
        "    stored(one, 1, 2)\n"
        "    found = one.find(document(2) + QUESTION + document(1))\n"
        "    assert one.match_keys(split(found.digests)) is not None\n"
        "    print('held', flush=True)\n"
        "    time.sleep(60)\n"
    )
    command = [sys.executable, "-c", child, daemon.socket]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert daemon.status()["leases"] == 1
        os.kill(process.pid, signal.SIGKILL)
    daemon.wait_until(leases=0, pins=0, reservations=0, quarantined_bytes=0)
    with engine(daemon) as another:
        assert loaded(another, document(2) + QUESTION + document(1)) == 8


def test_a_lease_that_lapsed_between_lookup_and_copy_loads_nothing(tmp_path: Path) -> None:
    with running_daemon(tmp_path, "16MiB", lease_s=0.3) as daemon, engine(daemon) as one:
        stored(one, 1)
        what = one.match_keys(split(one.find(QUESTION + document(1)).digests))
        assert what is not None
        assert one.hand_over(what)
        time.sleep(0.4)
        one.copy(what)
        assert one.wait(what) == 0
        daemon.wait_until(leases=0, pins=0)


def test_a_new_daemon_knows_no_chunks_until_they_are_indexed_again(tmp_path: Path) -> None:
    with tiered(tmp_path) as daemon, engine(daemon) as one:
        stored(one, 1)
        flushed(daemon)
        daemon.stop()
        daemon.start()
        one.wait_connected()
        assert not one.find(QUESTION + document(1)).segments
        assert one.load(document(1)) == 4  # an exact hit, from the disk
        one.verify()
        one.index(document(1))
        assert loaded(one, QUESTION + document(1)) == 4


def test_without_a_daemon_nothing_is_found_and_nothing_raises(daemon: Daemon) -> None:
    with engine(daemon) as one:
        stored(one, 1)
        client = SegmentClient(one.scheduler, TOKENS)
        one.kill(SCHEDULER)
        assert client.find_segments("r", b"", bytes(4096), WIDTH) == Segments()
        assert not client.index_chunks(b"", bytes(WIDTH), WIDTH, bytes(64))


@contextmanager
def scripted(
    folder: Path, registration: Register, answer: Answer, features: tuple[str, ...] = FEATURES
) -> Iterator[tuple[ScriptedDaemon, SegmentClient]]:
    """A client of a daemon that answers searches so."""
    with ScriptedDaemon(folder / "scripted.sock") as daemon:
        daemon.welcome = lambda welcome: msgspec.structs.replace(welcome, features=features)
        daemon.answers[FindSegments] = answer
        scheduler = SchedulerClient(daemon.path, registration)
        scheduler.connect(10)
        yield daemon, SegmentClient(scheduler, TOKENS)
        scheduler.close()


def asked(daemon: ScriptedDaemon) -> int:
    return sum(isinstance(message, FindSegments | IndexChunks) for message in daemon.received)


def test_an_older_daemon_is_asked_nothing(tmp_path: Path, registration: Register) -> None:
    older = tuple(name for name in FEATURES if name != "segments")
    with scripted(tmp_path, registration, lambda _: [], older) as (daemon, client):
        assert client.find_segments("r", b"", bytes(4096), WIDTH) == Segments()
        assert not client.index_chunks(b"", bytes(WIDTH), WIDTH, bytes(64))
        assert asked(daemon) == 0


def test_an_answer_that_does_not_come_is_nothing_found_after_a_while(
    tmp_path: Path, registration: Register
) -> None:
    with scripted(tmp_path, registration, lambda _: []) as (daemon, client):
        ask = "r", b"", bytes(4096), WIDTH
        assert client.find_segments(*ask) is PENDING
        assert eventually(lambda: client.find_segments(*ask) == Segments())
        assert asked(daemon) == 1


@pytest.mark.parametrize(
    ("segment", "digests"),
    [
        (Segment(new_start=0, old_start=0, length=16), bytes(2 * WIDTH)),
        (Segment(new_start=0, old_start=0, length=8), bytes(WIDTH)),
        (Segment(new_start=3, old_start=0, length=16), bytes(WIDTH)),
        (Segment(new_start=1000, old_start=0, length=32), bytes(2 * WIDTH)),
        (Segment(new_start=16, old_start=-16, length=16), bytes(WIDTH)),
    ],
    ids=["digests", "length", "before first", "behind the prompt", "old start"],
)
def test_segments_that_cannot_be_end_the_connection(
    tmp_path: Path, registration: Register, segment: Segment, digests: bytes
) -> None:
    def lie(message: FromClient) -> list[FromDaemon]:
        return [Segments(seq=message.seq, segments=(segment,), digests=digests)]

    with scripted(tmp_path, registration, lie) as (daemon, client):
        ask = "r", b"", bytes(4096), WIDTH, 4
        assert eventually(lambda: client.find_segments(*ask) == Segments())
        assert eventually(lambda: daemon.eofs == 1)
