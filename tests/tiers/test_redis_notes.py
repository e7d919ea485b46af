"""Notes on a server that evicts: they outlive what is stored after them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvass.tiers import Tier, open_tier
from kvass.tiers import redis as redis_tier
from kvass.tiers.kept import Kept
from tests.support.servers.redis import RedisServer
from tests.tiers.records import KEYS, fill, hits, keys_of

NOTES = {f"epoch.{i}": b"value %d" % i for i in range(5)}
LARGE = (1 << 20,)

Open = Callable[[], Tier]


@pytest.fixture
def server() -> Iterator[RedisServer]:
    made = RedisServer("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru")
    yield made
    made.close()


@pytest.fixture
def opened(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Tiers that keep their notes with every call."""
    monkeypatch.setattr(redis_tier, "_KEEP_S", 0.0)
    made: list[Tier] = []

    def start() -> Tier:
        made.append(open_tier(f"redis:{server.address}?timeout_s=5"))
        return made[-1]

    yield start
    for tier in made:
        tier.close()


def test_notes_outlive_three_times_the_servers_memory(server: RedisServer, opened: Open) -> None:
    tier = opened()
    for name, value in NOTES.items():
        tier.set_note(name, value)
    for turn in range(24):
        assert all(fill(tier, keys_of(8, f"turn {turn}"), LARGE))
    info: Any = server.client().info()
    assert info["evicted_keys"] > 100
    for one in (tier, opened()):
        assert {name: one.note(name) for name in NOTES} == NOTES


@pytest.mark.parametrize("ask", [fill, hits])
@pytest.mark.parametrize("seen", ["set", "read"])
def test_a_note_that_is_gone_is_set_again(
    server: RedisServer, opened: Open, ask: Callable[..., object], seen: str
) -> None:
    tier = opened()
    (tier if seen == "set" else opened()).set_note("epoch", b"1")
    assert tier.note("epoch") == b"1"
    server.client().delete("kvass:n:epoch")
    ask(tier, KEYS)
    assert opened().note("epoch") == b"1"


def test_another_daemons_newer_note_is_not_replaced_and_remembered(
    server: RedisServer, opened: Open
) -> None:
    tier, other = opened(), opened()
    tier.set_note("epoch", b"1")
    other.set_note("epoch", b"2")
    fill(tier, KEYS)
    assert tier.note("epoch") == b"2"
    server.client().delete("kvass:n:epoch")
    fill(tier, KEYS)
    assert other.note("epoch") == b"2"


def test_an_older_note_is_not_remembered_instead_of_a_newer_one(
    server: RedisServer, opened: Open
) -> None:
    """The server went back to a snapshot, and lost the note after that."""
    tier = opened()
    tier.set_note("epoch", b"2")
    server.client().set("kvass:n:epoch", b"1")
    fill(tier, KEYS)
    assert tier.note("epoch") == b"1"
    server.client().delete("kvass:n:epoch")
    fill(tier, KEYS)
    assert tier.note("epoch") == b"2"


def test_trouble_with_notes_is_no_trouble_of_the_call(server: RedisServer, opened: Open) -> None:
    """The server goes between the records and the notes."""
    tier: Any = opened()
    tier.set_note("epoch", b"1")
    real = tier._in_groups

    def dying(*arguments: Any) -> Any:
        try:
            return real(*arguments)
        finally:
            server.kill()

    tier._in_groups = dying
    assert all(fill(tier, KEYS))


def test_what_is_due_when() -> None:
    now = [100.0]
    kept = Kept(2.0, lambda: now[0])
    kept.remember("a", b"1")
    assert kept.due() == []
    now[0] += 2
    assert kept.due() == [("a", b"1")]
    assert kept.due() == []
    kept.remember("a", b"3")
    kept.found("a", b"2")  # what the server had before
    now[0] += 2
    assert kept.due() == [("a", b"3")]
