"""Segments over a real daemon: chunks found where they are not a prefix, and their right bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvass.client.lookups import PENDING
from kvass.client.scheduler import SchedulerClient
from kvass.client.segments import SegmentClient
from kvass.messages import (
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


def test_segments_are_promoted_from_a_disk_after_they_left_l1(tmp_path: Path) -> None:
    with tiered(tmp_path, "4MiB") as daemon, engine(daemon, model=LARGE) as one:
        for number in range(1, 9):  # twice what L1 holds
            stored(one, number)
            flushed(daemon)
        assert daemon.status()["rows"] < daemon.status()["indexed_chunks"] == 32
        assert loaded(one, document(2) + QUESTION + document(1)) == 8
        assert daemon.status()["counters"]["promoted_chunks"] >= 8
        daemon.wait_until(leases=0, pins=0)


def test_without_a_daemon_nothing_is_found_and_nothing_raises(daemon: Daemon) -> None:
    with engine(daemon) as one:
        stored(one, 1)
        client = SegmentClient(one.scheduler, TOKENS)
        one.kill(SCHEDULER)
        assert client.find_segments("r", b"", bytes(4096), WIDTH) == Segments()
        assert not client.index_chunks(b"", bytes(WIDTH), WIDTH, bytes(64))


@contextmanager
def scripted(
    folder: Path, registration: Register, answer: Answer
) -> Iterator[tuple[ScriptedDaemon, SegmentClient]]:
    """A client of a daemon that answers searches so."""
    with ScriptedDaemon(folder / "scripted.sock") as daemon:
        daemon.answers[FindSegments] = answer
        scheduler = SchedulerClient(daemon.path, registration)
        scheduler.connect(10)
        yield daemon, SegmentClient(scheduler, TOKENS)
        scheduler.close()


def asked(daemon: ScriptedDaemon) -> int:
    return sum(isinstance(message, FindSegments | IndexChunks) for message in daemon.received)


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
