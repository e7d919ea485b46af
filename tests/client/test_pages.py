"""``PageStore`` against a real daemon."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvass import PageStore, Plane, Put
from kvass.client import connection
from kvass.client.pages import PageClient
from kvass.client.worker import ArenaLease, WorkerClient
from kvass.engine.pages import MOST_PRESENT
from kvass.errors import UsageError
from kvass.messages import Granted
from kvass.testing.daemon import Daemon, running_daemon
from kvass.transfer.base import U8Array
from kvass.transfer.page_rows import PageRows
from tests.client.test_tiers import flushed, tiered
from tests.support.waiting import eventually

PAGES = 64
RUN, LAYERS = 1536, 3
PAGE_BYTES = RUN * LAYERS
FIELDS = {"weights": "w"}
PATIENT: dict[str, Any] = {"lookup_budget_ms": 10_000}
"""Options of daemons that do not hang: on a loaded machine they may answer late."""
BOUND_S = 10.0
"""What a call that waits for nobody takes at most on a loaded machine."""


class Engine:
    """A store with ``PAGES`` pages of random bytes in ``LAYERS`` planes."""

    def __init__(self, daemon: Daemon, run: int = RUN, pages: int = PAGES, **more: Any) -> None:
        self.memory: U8Array = np.random.default_rng(0).integers(
            0, 256, LAYERS * pages * run, np.uint8
        )
        planes = [Plane(i * pages * run, run, run) for i in range(LAYERS)]
        fields = more.pop("fields", FIELDS)
        self.store = PageStore(daemon.socket, fields, planes, [self.memory], 1, pages, **more)
        self.grid = self.memory.reshape(LAYERS, pages, run)
        assert self.store.wait_connected(10)

    def loads(self, keys: list[bytes], source: U8Array, pages: list[int] | None = None) -> int:
        """Load ``keys`` and compare what came with ``source``, shape ``(layers, keys, bytes)``."""
        into = pages if pages is not None else list(range(PAGES - len(keys), PAGES))
        self.grid[:, into] = 0
        count = self.store.get(keys, into)
        assert np.array_equal(self.grid[:, into[:count]], source[:, :count])
        return count


def keys_of(count: int, name: str = "") -> list[bytes]:
    return [hashlib.sha256(f"{name}/{number}".encode()).digest() for number in range(count)]


KEYS = keys_of(16)
FIRST = list(range(len(KEYS)))
"""Page 0 is a page like any other."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running_daemon(tmp_path_factory.mktemp("pages"), "32MiB", **PATIENT) as one:
        yield one


@pytest.fixture(autouse=True)
def patient(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine makes no miss, but where a test is about bounds."""
    if request.node.get_closest_marker("alone") is None:
        for name in ("ANSWER_S", "TIERS_S"):
            monkeypatch.setattr(f"kvass.client.pages.{name}", 10.0)


@pytest.fixture
def daemon(shared: Daemon) -> Iterator[Daemon]:
    """A daemon whose namespaces were cleared, and which holds nothing after the test."""
    yield shared
    shared.wait_until(pins=0, leases=0, reservations=0)


@pytest.fixture
def make(request: pytest.FixtureRequest, daemon: Daemon) -> Iterator[Callable[..., Engine]]:
    """Makes engines of a namespace that only this test has."""
    made: list[Engine] = []

    def one(**more: Any) -> Engine:
        fields = {"weights": request.node.name, **more.pop("fields", {})}
        made.append(Engine(daemon, fields=fields, **more))
        return made[-1]

    yield one
    for engine in made:
        engine.store.close()


def test_what_one_store_put_another_gets(make: Callable[..., Engine]) -> None:
    a, b = make(), make()
    source = a.grid[:, FIRST].copy()
    assert a.store.put(KEYS, FIRST) == [Put.STORED] * 16
    assert b.store.put(KEYS[:4], FIRST[:4]) == [Put.HELD] * 4
    assert b.store.has(KEYS) == 16
    scattered = np.random.default_rng(1).permutation(PAGES)[:16].tolist()
    assert b.loads(KEYS, source, scattered) == 16
    assert b.loads([*KEYS[:5], *keys_of(2, "other"), *KEYS[5:]], source) == 5
    assert b.store.counters["loaded"] == 21
    assert b.store.counters["missed"] == 13


def test_negative_control_a_wrong_byte_is_seen(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    a = make()
    source = a.grid[:, FIRST].copy()
    right = PageRows.copy

    def wrong(rows: PageRows, kind: Any, plan: Any, arena: U8Array) -> None:
        right(rows, kind, plan, arena)
        arena[plan.rows[3].slot + 2 * RUN + 5] ^= 1

    with monkeypatch.context() as patch:
        patch.setattr(PageRows, "copy", wrong)
        assert a.store.put(KEYS, FIRST) == [Put.STORED] * 16
    with pytest.raises(AssertionError):
        a.loads(KEYS, source)


def test_fields_and_page_sizes_are_kept_apart(make: Callable[..., Engine]) -> None:
    a = make()
    a.store.put(KEYS, FIRST)
    assert make(fields={"rope": "2"}).store.has(KEYS) == 0
    assert make(run=RUN // 2).store.has(KEYS) == 0, "another layout under the same fields"
    assert make().store.has(KEYS) == 16


def test_more_than_the_share_of_writes_is_stored_piece_by_piece(
    make: Callable[..., Engine],
) -> None:
    """24 MiB of pages, in an L1 of 32 MiB of which one engine writes 8 MiB at a time."""
    a = make(run=128 << 10)
    source = a.grid.copy()
    keys = keys_of(PAGES, "large")
    assert a.store.put(keys, list(range(PAGES))) == [Put.STORED] * PAGES
    assert a.loads(keys, source, list(range(PAGES))) == PAGES


def test_what_there_is_no_room_for_is_refused(make: Callable[..., Engine]) -> None:
    """48 MiB of one prompt: its last pages do not push out its first ones."""
    a = make(run=256 << 10)
    keys = keys_of(PAGES, "too large")
    became = a.store.put(keys, list(range(PAGES)))
    stored = became.count(Put.STORED)
    assert 16 < stored < PAGES
    assert became == [Put.STORED] * stored + [Put.REFUSED] * (PAGES - stored)
    assert a.store.has(keys) == stored
    again = a.store.put(keys, list(range(PAGES)))
    assert again == [Put.HELD] * stored + [Put.REFUSED] * (PAGES - stored)


def test_after_a_new_generation_nothing_of_before_is_loaded(make: Callable[..., Engine]) -> None:
    a, b, c = make(), make(), make()
    source = a.grid[:, FIRST].copy()
    a.store.put(KEYS, FIRST)
    a.store.new_generation(b"step 7")
    assert a.store.get(KEYS, FIRST) == 0
    assert b.loads(KEYS, source) == 16, "others still have the old weights"
    assert a.store.put(KEYS, FIRST) == [Put.STORED] * 16
    c.store.new_generation(b"step 7")
    assert c.loads(KEYS, source) == 16, "the same token shares"
    c.store.new_generation()
    assert c.store.has(KEYS) == 0


def test_what_a_new_generation_overtakes_is_neither_loaded_nor_stored(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    a = make()
    a.store.put(KEYS[:8], FIRST[:8])
    right = PageRows.copy

    def overtaken(rows: PageRows, kind: Any, plan: Any, arena: U8Array) -> None:
        right(rows, kind, plan, arena)
        a.store.new_generation()

    with monkeypatch.context() as patch:
        patch.setattr(PageRows, "copy", overtaken)
        assert a.store.get(KEYS[:8], FIRST[:8]) == 0
        assert eventually(lambda: a.store.put(KEYS, FIRST) == [Put.REFUSED] * 16)
    assert eventually(lambda: a.store.put(KEYS[:1], [0])[0] is Put.STORED)
    assert a.store.has(KEYS) == 1


def test_a_load_that_ends_late_is_a_miss(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    a = make()
    a.store.put(KEYS, FIRST)
    with monkeypatch.context() as patch:
        late = SimpleNamespace(monotonic=lambda: time.monotonic() + 1e9)
        patch.setattr("kvass.engine.pages.time", late)
        assert a.store.get(KEYS, FIRST) == 0
    assert a.store.counters["late"] == 16
    assert a.store.get(KEYS, FIRST) == 16


def test_a_store_that_ends_late_is_refused(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    a = make()
    right = PageClient.reserve

    def reserve(*args: Any) -> tuple[Granted, ArenaLease | None] | None:
        given = right(*args)
        assert given is not None
        given[0].deadline_s = time.monotonic()
        return given

    with monkeypatch.context() as patch:
        patch.setattr(PageClient, "reserve", reserve)
        assert a.store.put(KEYS, FIRST) == [Put.REFUSED] * 16


def test_a_rank_that_does_not_know_yet_that_it_is_known_leaves_nothing_held(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, daemon: Daemon
) -> None:
    """The daemon has registered it, so lookups match; its own connection is not ready."""
    a = make()
    a.store.put(KEYS, FIRST)
    with monkeypatch.context() as patch:
        patch.setattr(WorkerClient, "arena", lambda *_: None)
        assert a.store.get(KEYS, FIRST) == 0
        assert a.store.put(keys_of(4, "new"), FIRST[:4]) == [Put.REFUSED] * 4
    daemon.wait_until(leases=0, reservations=0, pins=0)
    assert a.store.put(keys_of(4, "new"), FIRST[:4]) == [Put.STORED] * 4
    assert a.store.get(KEYS, FIRST) == 16


@pytest.mark.parametrize("call", ["put", "get"])
def test_who_is_interrupted_leaves_nothing_held(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, daemon: Daemon, call: str
) -> None:
    """Ctrl-C while the daemon is slow."""

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    a = make()
    a.store.put(KEYS[:8], FIRST[:8])
    daemon.suspend()
    try:
        with monkeypatch.context() as patch:
            interrupted = SimpleNamespace(monotonic=time.monotonic, sleep=interrupt)
            patch.setattr("kvass.client.pages.time", interrupted)
            with pytest.raises(KeyboardInterrupt):
                getattr(a.store, call)(KEYS, FIRST)
    finally:
        daemon.resume()
    stored = [Put.HELD] * 8 + [Put.STORED] * 8
    assert eventually(lambda: a.store.put(KEYS, FIRST) == stored), "a grant is aborted as it comes"
    daemon.wait_until(leases=0, reservations=0, pins=0)
    assert a.store.get(KEYS, FIRST) == 16


def test_more_keys_than_a_message_has_are_asked_in_parts(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PageClient, "most_keys", 8)
    a = make()
    source = a.grid.copy()
    assert a.store.put(KEYS, FIRST) == [Put.STORED] * 16
    assert a.store.has([*KEYS, *keys_of(9, "more")]) == 16
    assert a.store.put([*KEYS, *keys_of(2, "more")], list(range(18)))[-2:] == [Put.STORED] * 2
    assert a.store.present(KEYS) == [True] * 16
    assert a.loads(KEYS[:8], source) == 8
    assert a.loads(KEYS[:4], source) == 4


@pytest.mark.parametrize("named", [True, False], ids=["named", "control"])
def test_a_prompt_whose_pages_before_are_named_keeps_its_beginning(
    tmp_path: Path, named: bool
) -> None:
    """A prompt of 24 MiB in parts, then another of 12 MiB, in an L1 of 32 MiB."""
    with running_daemon(tmp_path, "32MiB", **PATIENT) as daemon:
        a = Engine(daemon, run=128 << 10)
        keys, other = keys_of(PAGES, "long"), keys_of(PAGES // 2, "other")
        for at in range(0, PAGES, 16):
            before = keys[:at] if named else []
            assert all(a.store.put(keys[at : at + 16], list(range(at, at + 16)), before))
        assert all(a.store.put(other, list(range(PAGES // 2))))
        left = a.store.has(keys)
        assert left > PAGES // 2 if named else left < PAGES // 4
        a.store.close()


def test_a_clear_forgets(make: Callable[..., Engine]) -> None:
    a, b = make(), make()
    a.store.put(KEYS, FIRST)
    assert b.store.clear()
    assert a.store.get(KEYS, FIRST) == b.store.has(KEYS) == 0
    assert a.store.put(KEYS, FIRST) == [Put.STORED] * 16


def test_many_threads_use_one_store(make: Callable[..., Engine]) -> None:
    a = make()
    source = a.grid.copy()

    def work(number: int) -> bool:
        pages = list(range(8 * number, 8 * number + 8))
        same = True
        for turn in range(10):
            keys = keys_of(8, f"{number} {turn}")
            same &= all(a.store.put(keys, pages)) and a.store.has(keys) == 8
            same &= a.store.get(keys, pages) == 8
            same &= np.array_equal(a.grid[:, pages], source[:, pages])
        return same

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    assert a.store.counters == {"stored": 640, "loaded": 640}


def test_misuse_in_a_call_is_a_miss_and_none_of_it_is_copied(
    make: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    a = make()
    a.store.put(KEYS, FIRST)
    before = a.memory.copy()
    assert a.store.get(KEYS[:2], [3, 3]) == 0
    assert a.store.get(KEYS[:2], [3, PAGES]) == 0
    assert a.store.get(KEYS[:2], [-1, 3]) == 0
    assert a.store.get(KEYS[:2], [3]) == 0
    assert a.store.has([KEYS[0], KEYS[1][:16]]) == 0
    assert a.store.put(keys_of(2, "bad"), [0, PAGES]) == [Put.REFUSED] * 2
    assert a.store.put([], []) == []
    assert np.array_equal(a.memory, before)
    assert a.store.counters["_get"] == 4
    assert "name each page once" in caplog.text


def test_presence_is_told_key_by_key(make: Callable[..., Engine]) -> None:
    a, b = make(), make()
    a.store.put(KEYS[::2], FIRST[::2])
    assert b.store.present(KEYS) == [True, False] * 8
    assert b.store.present([KEYS[0], KEYS[1][:16]]) == [False] * 2, "misuse"
    assert b.store.present([]) == []
    many = [*keys_of(MOST_PRESENT, "many"), KEYS[2]]
    assert b.store.present(many) == [False] * MOST_PRESENT + [True]


def test_an_older_daemon_is_asked_for_what_it_knows(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "FEATURES", ())
    right = PageClient.reserve

    def reserve(*args: Any) -> tuple[Granted, ArenaLease | None] | None:
        given = right(*args)
        if given is not None:
            given[0].grants[0].refused = None
        return given

    monkeypatch.setattr(PageClient, "reserve", reserve)
    a = make()
    assert a.store.put(KEYS[:4], FIRST[:4]) == [Put.STORED] * 4
    assert a.store.put(KEYS, FIRST) == [Put.HELD] * 4 + [Put.STORED] * 12
    assert a.store.present([*KEYS[:3], *keys_of(1, "?"), KEYS[4]]) == [True] * 3 + [False] * 2


def test_what_left_shared_memory_comes_back_from_a_tier(tmp_path: Path) -> None:
    """Twice what L1 holds; a daemon that starts anew has all of it in its tier alone."""
    run, keys = 128 << 10, keys_of(PAGES, "cold")
    with tiered(tmp_path, "32MiB", **PATIENT) as daemon:
        a = Engine(daemon, run=run)
        source = a.grid.copy()
        for at in range(0, PAGES, 16):
            pages = list(range(at, at + 16))
            assert all(a.store.put(keys[at : at + 16], pages))
            flushed(daemon)
        a.store.close()
        daemon.restart()
        b = Engine(daemon, run=run)
        other = keys_of(1, "never")
        assert eventually(lambda: b.store.present([keys[40], *other, keys[3]]) == [1, 0, 1])
        assert daemon.status()["rows"] == 0, "asking promotes nothing"
        for at in range(0, PAGES, 16):
            assert b.store.has(keys[at : at + 16]) == 16
            pages = list(range(at, at + 16))
            assert b.loads(keys[at : at + 16], source[:, pages], pages) == 16
        assert b.store.clear()
        assert b.store.present(keys) == [False] * PAGES
        daemon.wait_until(pins=0, leases=0, reservations=0, rows_loading=0)
        b.store.close()


def test_pages_are_paid_by_the_tenant_that_stored_them(tmp_path: Path) -> None:
    """3 MiB of pages each: of a tenant that may have 1 MiB, and of one without a cap."""
    with running_daemon(tmp_path, "16MiB", quota=["a=1MiB", "b=:0"], **PATIENT) as daemon:
        one = Engine(daemon, run=16 << 10, tenant="a")
        keys, others = keys_of(PAGES, "a"), keys_of(PAGES, "b")
        capped = one.store.put(keys, list(range(PAGES)))
        assert 0 < capped.count(Put.STORED) * one.store.row_bytes <= 1 << 20
        assert all(one.store.put(others, list(range(PAGES)), tenant="b"))
        assert one.store.has(others, tenant="a") == PAGES, "all find the rows of all"
        one.store.close()


def test_lookups_and_hits_are_the_tenants(tmp_path: Path) -> None:
    """Of the store's tenant, and of one that a call names; who pays is the one that stored."""
    asked = ("lookups", "lookup_tokens", "hit_tokens")
    with running_daemon(tmp_path, "16MiB", quota=["a=:0", "b=:0"], **PATIENT) as daemon:
        store = Engine(daemon, tenant="a").store

        def figures() -> dict[str, tuple[int, ...]]:
            listed = {each["tenant"]: each for each in daemon.status()["tenants"]}
            return {name: tuple(listed[name][each] for each in asked) for name in listed}

        assert all(store.put(KEYS, FIRST))
        paid = {each["tenant"]: each["l1_bytes"] for each in daemon.status()["tenants"]}
        assert paid["a"] >= len(KEYS) * store.row_bytes
        assert paid["b"] == paid["default"] == 0
        before = figures()["a"]
        assert store.get([*KEYS, *keys_of(4, "?")], list(range(20, 40))) == len(KEYS)
        assert store.has(KEYS[:3], tenant="b") == 3
        assert store.get(KEYS[:5], FIRST[:5], tenant="b") == 5
        now = figures()
        assert [new - old for new, old in zip(now["a"], before, strict=True)] == [1, 20, 16]
        assert now["b"] == (2, 8, 8)
        assert now["default"] == (0, 0, 0)
        store.close()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"planes": []}, "at least one plane"),
        ({"fields": {}}, "name the weights"),
        ({"page_tokens": 0}, "at least one token"),
        ({"pages": 65}, "ends at byte"),
        ({"pages": 0}, "at least one block"),
        ({"planes": [Plane(0, 16, 32)]}, "overlap"),
        ({"planes": [Plane(0, 32, 32, 1)]}, "1 regions"),
        ({"regions": [np.zeros(1024, np.uint16)]}, "flat uint8 array"),
    ],
)
def test_arguments_that_describe_no_memory_are_refused(change: dict[str, Any], text: str) -> None:
    right: dict[str, Any] = {
        "socket": "/nowhere",
        "fields": FIELDS,
        "planes": [Plane(0, 32, 32)],
        "regions": [np.zeros(64 * 32, np.uint8)],
        "page_tokens": 1,
        "pages": 64,
    }
    PageStore(**right).close()
    with pytest.raises(UsageError, match=text):
        PageStore(**{**right, **change})


@pytest.mark.alone
def test_a_daemon_that_dies_or_hangs_costs_a_bound_and_comes_back(tmp_path: Path) -> None:
    def misses(engine: Engine) -> None:
        began_s = time.monotonic()
        assert engine.store.get(KEYS, FIRST) == 0
        assert engine.store.has(KEYS) == 0
        assert engine.store.put(keys_of(2, "lost"), FIRST[:2]) == [Put.REFUSED] * 2
        assert not engine.store.clear(0.1)
        assert time.monotonic() - began_s < BOUND_S

    with running_daemon(tmp_path, "16MiB", lookup_budget_ms=500) as daemon:
        engine = Engine(daemon)
        source = engine.grid[:, FIRST].copy()
        assert all(engine.store.put(KEYS, FIRST))
        daemon.suspend()
        misses(engine)
        daemon.resume()
        assert eventually(lambda: all(engine.store.put(KEYS, FIRST)))
        assert engine.loads(KEYS, source) == 16
        engine.grid[:, FIRST] = source
        daemon.kill()
        misses(engine)
        daemon.start()
        assert engine.store.wait_connected(10)
        assert eventually(lambda: all(engine.store.put(KEYS, FIRST)))
        assert engine.loads(KEYS, source) == 16
        daemon.wait_until(pins=0, leases=0, reservations=0)
        engine.store.close()
        assert engine.store.get(KEYS, FIRST) == 0


@pytest.mark.alone
def test_a_thread_that_waits_for_a_hanging_daemon_holds_up_no_other(tmp_path: Path) -> None:
    with running_daemon(tmp_path, "16MiB") as daemon:
        engine = Engine(daemon)
        daemon.suspend()
        ended: list[float] = []

        def one() -> None:
            engine.store.has(KEYS)
            ended.append(time.monotonic())

        threads = [threading.Thread(target=one) for _ in range(16)]
        began_s = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(BOUND_S)
        daemon.resume()
        assert len(ended) == 16
        assert max(ended) - began_s < BOUND_S
        engine.store.close()
