"""Segments over a real daemon: chunks found where they are not a prefix, and their right bytes."""

from __future__ import annotations

from pathlib import Path

from kvass.testing.daemon import running_daemon
from kvass.testing.fake_engine import WIDTH, FakeEngine, chunk_keys
from tests.client.test_tiers import engine

TOKENS = 16


def document(number: int, chunks: int = 4) -> list[int]:
    """Tokens that no other document has."""
    return [10_000 * number + i for i in range(chunks * TOKENS)]


def split(digests: bytes) -> list[bytes]:
    return [digests[at : at + WIDTH] for at in range(0, len(digests), WIDTH)]


def stored(one: FakeEngine, *numbers: int) -> None:
    for number in numbers:
        assert one.store(document(number)) == 4
        one.index(document(number))


def test_documents_in_another_order_are_found_and_loaded_under_one_lease(tmp_path: Path) -> None:
    with running_daemon(tmp_path, "16MiB") as daemon, engine(daemon) as one:
        stored(one, 1, 2, 3)
        question = [7] * 5
        prompt = document(2) + question + document(3) + document(1) + question
        prefix = chunk_keys(document(2), TOKENS)
        found = one.find(prompt, first=64)
        assert [(s.new_start, s.old_start, s.length) for s in found.segments] == [
            (69, 0, 64),
            (133, 0, 64),
        ]
        keys = chunk_keys(document(3), TOKENS) + chunk_keys(document(1), TOKENS)
        assert split(found.digests) == keys
        what = one.match_keys(prefix + keys)
        assert what is not None
        assert daemon.status()["leases"] == 1
        assert one.hand_over(what)
        one.copy(what)
        assert one.wait(what) == 12
        one.verify()
        daemon.wait_until(leases=0, pins=0)
