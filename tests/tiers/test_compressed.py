"""Compressed records in a folder and on servers: right bytes or a miss, beside plain ones."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from threading import Barrier
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from kvass.errors import ConfigError, TierDown
from kvass.testing import TierSuite
from kvass.testing.tier_suite import ROOM, MakeTier, data_of, room_for, same
from kvass.tiers import Tier, codings, compressed, open_tier, redis
from kvass.tiers.base import Buffer
from kvass.tiers.compressed import CompressedTier, Form, try_a_core
from kvass.tiers.disk import DiskTier
from kvass.tiers.planes import Coding, best_coding, encode
from kvass.tiers.rates import Rate
from kvass.types import PAGE
from tests.support.servers.mooncake import MooncakeServer
from tests.support.servers.redis import RedisServer
from tests.support.servers.s3 import S3Server, credentials
from tests.tiers.conftest import Start
from tests.tiers.records import KEYS, OpenAt, Raw, SharedSuite, fill, hits, works

SERVER = RedisServer
SIZE = 300_000
numbers = count()


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any record above a few bytes is kept as a compressed one, whatever it has."""
    monkeypatch.setattr(compressed, "LEAST_BYTES", 500)
    monkeypatch.setattr(codings, "WORTH", 1.1)


def name_of(key: bytes) -> bytes:
    return compressed._names(Form.COMPRESSED, [key])[0]


def opened(url: str) -> CompressedTier:
    tier = open_tier(url)
    assert isinstance(tier, CompressedTier)
    return tier


@pytest.fixture
def disk(folder: Path) -> Iterator[Any]:
    """Opens the tier in ``folder`` with options; closes what the test leaves."""
    tiers: list[Tier] = []

    def open_(options: str = "compress=lossless") -> Any:
        tiers.append(open_tier(f"disk:{folder}?capacity=32MiB&{options}"))
        return tiers[-1]

    yield open_
    for tier in tiers:
        tier.close()


# ---------------------------------------------------------------- every tier


@pytest.mark.usefixtures("always")
class TestCompressedDisk(TierSuite):
    @pytest.fixture(params=["", "&key_file"])
    def make_tier(self, request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> MakeTier:
        options = request.param
        if options:
            (path := tmp_path / "keys").touch(0o600)
            path.write_text("11" * 32)
            options += f"={path}"
        return lambda: open_tier(f"disk:{folder}?capacity={ROOM}&compress=lossless{options}")


@pytest.mark.usefixtures("always")
class TestCompressedRedis(SharedSuite):
    @pytest.fixture
    def open_at(self, server: RedisServer) -> OpenAt:
        return lambda prefix: opened(f"redis:{server.address}?prefix=z{prefix}:&compress=lossless")

    @pytest.fixture
    def raw(self, server: RedisServer) -> Raw:
        client: Any = server.client()
        return Raw(
            lambda prefix, key: client.get(f"z{prefix}:r:".encode() + name_of(key)),
            lambda prefix, key, value: client.set(f"z{prefix}:r:".encode() + name_of(key), value),
        )


@pytest.mark.slow
@pytest.mark.usefixtures("always")
class TestCompressedS3(SharedSuite):
    @pytest.fixture(scope="class")
    def s3(self) -> Iterator[S3Server]:
        server = S3Server()
        yield server
        server.close()

    @pytest.fixture
    def open_at(self, s3: S3Server) -> Iterator[OpenAt]:
        with credentials():
            yield lambda prefix: opened(s3.url(f"z/{prefix}", "&compress=lossless"))

    @pytest.fixture
    def raw(self, s3: S3Server) -> Raw:
        name = "z/{}/records/{}".format
        return Raw(
            lambda prefix, key: s3.get(name(prefix, name_of(key).hex())),
            lambda prefix, key, value: s3.put(name(prefix, name_of(key).hex()), value),
        )


@pytest.mark.slow
@pytest.mark.usefixtures("always")
class TestCompressedMooncake(SharedSuite):
    huge = 2 << 20

    @pytest.fixture(scope="class")
    def mooncake(self) -> Iterator[MooncakeServer]:
        server = MooncakeServer()
        yield server
        server.close()

    @pytest.fixture
    def open_at(self, mooncake: MooncakeServer) -> OpenAt:
        return lambda prefix: opened(
            f"mooncake:{mooncake.address}?prefix=z{prefix}:&compress=lossless"
        )

    @pytest.fixture
    def raw(self, mooncake: MooncakeServer) -> Raw:
        [owner] = mooncake.owners
        return Raw(
            lambda prefix, key: owner.get(f"z{prefix}:r:{name_of(key).hex()}"),
            lambda prefix, key, value: owner.put(f"z{prefix}:r:{name_of(key).hex()}", value),
        )


# ---------------------------------------------------------------- both forms in one store


def rows(count: int, size: int = SIZE) -> list[list[Buffer]]:
    """Values in bfloat16 of a normal distribution, of which no two rows are alike."""
    values = np.random.default_rng(next(numbers)).standard_normal(count * size // 2, np.float32)
    halves = (values.view("<u4") >> 16).astype("<u2").view(np.uint8)
    return [[one] for one in halves.reshape(count, size)]


def gives_back(tier: Tier, keys: list[bytes], data: list[list[Buffer]]) -> bool:
    return all(loads(tier, data, keys))


def loads(tier: Tier, data: list[list[Buffer]], keys: list[bytes] = KEYS) -> list[bool]:
    """Which are there. What is there is right, or the test fails."""
    into = [room_for((len(shard),), aligned=True) for (shard,) in data]
    held = tier.load(keys, into)
    assert all(same(got, want) for got, want, one in zip(into, data, held, strict=True) if one)
    return held


def test_records_take_less_room(disk: Any) -> None:
    tier, data = disk(), rows(10)
    assert all(tier.store(KEYS, data))
    assert gives_back(tier, KEYS, data)
    report = tier.report()
    assert report["compressed_records"] == 10
    assert report["compressed_from_bytes"] == 10 * SIZE
    assert report["compressed_to_bytes"] < 0.72 * 10 * SIZE
    slots = {segment.file.slot_bytes for segment in tier._tier._index.segments.values()}
    assert max(slots) < 0.75 * SIZE, "so does a slot"
    assert len(slots) <= 2, "few sizes"
    tier.close()
    assert gives_back(disk(), KEYS, data)


def test_each_form_is_found_beside_the_other(disk: Any) -> None:
    """By one who compresses and by one who knows how to. Who does not finds plain ones."""
    data = rows(10)
    plain = disk("compress=off")
    assert all(plain.store(KEYS[:5], data[:5]))
    plain.close()
    both = disk()
    assert both.store(KEYS[5:], data[5:]) == [True] * 5
    for _ in range(2):  # when it has seen their forms, too
        assert gives_back(both, KEYS, data)
        assert both.probe(KEYS) == [True] * 10
    both.close()
    auto = disk("compress=auto")
    assert auto.probe(KEYS) == [True] * 10
    assert gives_back(auto, KEYS, data)
    auto.close()
    plain = disk("compress=off")
    assert plain.probe(KEYS) == [True] * 5 + [False] * 5
    assert gives_back(plain, KEYS[:5], data[:5])
    assert not gives_back(plain, KEYS[5:], data[5:])
    assert plain.report()["damaged"] == 0
    plain.close()
    assert gives_back(disk(), KEYS, data), "nothing was deleted by who cannot read it"


@pytest.mark.parametrize("first", ["off", "lossless"])
def test_the_last_store_wins_in_whichever_form(disk: Any, first: str) -> None:
    """Whether who stores has seen the other one or not."""
    old, new = rows(10), rows(10)
    other = {"off": "lossless", "lossless": "off"}[first]
    one = disk(f"compress={first}")
    assert all(one.store(KEYS, old))
    one.close()
    two = disk()
    assert two.probe(KEYS[:5]) == [True] * 5
    two._on = other == "lossless"
    assert all(two.store(KEYS, new))
    two._on = True
    assert gives_back(two, KEYS, new)
    assert len(two._tier._index) == 10, "the other one is gone"
    two.delete(KEYS[:5])
    assert two.probe(KEYS) == [False] * 5 + [True] * 5
    two.close()
    assert disk().probe(KEYS) == [False] * 5 + [True] * 5


def test_a_kind_that_does_not_become_smaller_is_no_longer_tried(
    disk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A probe of the first ones says so; what others become is not changed by that."""
    probes = Mock(side_effect=best_coding)
    monkeypatch.setattr(codings, "best_coding", probes)
    monkeypatch.setattr(codings, "AGAIN", 20)
    tier, noise, data = disk(), (SIZE + 16,), rows(10)
    for turn in range(3):
        assert all(fill(tier, KEYS, noise, turn))
        assert probes.call_count == codings.PROBES * (1 + turn // 2), turn
        assert all(hits(tier, KEYS, noise, 3))
    assert tier.report()["compressed_records"] == 0
    assert tier.report()["not_compressed_records"] == 30
    assert all(tier.store(KEYS, data))
    assert tier.report()["compressed_records"] == 10


def test_a_kind_that_changes_is_probed_again(disk: Any) -> None:
    tier, data = disk(), rows(10)
    assert all(tier.store(KEYS, data))
    assert all(fill(tier, KEYS, (SIZE,)))  # not one of them becomes smaller
    assert all(hits(tier, KEYS, (SIZE,)))
    assert tier.report()["not_compressed_records"] == 10
    [group] = tier._codings._groups.values()
    assert group.coding is None
    assert group.left


def test_small_records_are_left_alone(disk: Any) -> None:
    tier, data = disk(), rows(10, 1000)
    assert all(tier.store(KEYS, data))
    assert gives_back(tier, KEYS, data)
    assert tier.report()["compressed_records"] == 0


# ---------------------------------------------------------------- what is not right


def put_body(tier: CompressedTier, key: bytes, body: Buffer) -> None:
    assert tier._tier.store([name_of(key)], [[body]]) == [True]


@pytest.mark.parametrize("why", ["bomb", "version", "cut", "checksum"])
def test_what_cannot_be_decoded_is_a_counted_miss(disk: Any, why: str) -> None:
    """A right record of the store with a body that is not: by another kvass, or by a stranger."""
    tier, data = disk(), rows(10)
    assert all(tier.store(KEYS, data))
    room = np.zeros(2 * SIZE, np.uint8)
    size = encode(data[3], Coding(2, (False, True)), room)
    body = room[:size].copy()
    if why == "bomb":
        body = np.zeros(2 * SIZE, np.uint8)  # more than a row can have
    if why == "version":
        body[0] = 9
    if why == "cut":
        body = body[:-5000]
    if why == "checksum":
        body[8] ^= 1
    put_body(tier, KEYS[3], body)
    into = [room_for((SIZE,)) for _ in KEYS]
    assert tier.load(KEYS, into) == [i != 3 for i in range(10)]
    report = tier.report()
    if why != "bomb":  # of that the store says that it is another one
        assert report["refused_records"] == 1
        [reason] = report["refusals"]
        assert reason.startswith("a compressed record: ")
        assert tier.probe(KEYS) == [i != 3 for i in range(10)], "so it is stored again"
    assert all(tier.store([KEYS[3]], [data[3]]))
    assert gives_back(tier, KEYS, data)
    assert all(tier.probe(KEYS))


def test_damage_of_the_disk_is_one_miss(folder: Path, disk: Any) -> None:
    """A flipped byte in each of a record's parts, and behind it; a file that was cut."""
    tier, data = disk(), rows(10)
    assert all(tier.store(KEYS, data))
    tier.close()
    path = folder / "00000001.seg"
    second = 0
    for at, misses in ((0, 1), (40, 1), (PAGE, 1), (PAGE + 40, 1), (150_000, 1), (-1, 0)):
        raw = bytearray(path.read_bytes())
        first = raw.index(b"kvassrec", PAGE)
        second = raw.index(b"kvassrec", first + 1)
        raw[(second if at < 0 else first) + at] ^= 1
        path.write_bytes(raw)
        tier = disk()
        assert loads(tier, data).count(False) == misses, at
        assert all(tier.store(KEYS, data))
        assert gives_back(tier, KEYS, data)
        tier.close()
    os.truncate(path, second + 20_000)
    tier = disk()
    assert loads(tier, data).count(True) < 10
    assert all(tier.store(KEYS, data))
    assert gives_back(tier, KEYS, data)


@pytest.mark.usefixtures("always")
def test_without_the_checksum_wrong_bytes_would_be_served(
    disk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: a body of other bytes, of which only the checksum is that of the right ones."""
    tier = disk()
    want, other = data_of(KEYS[0], (5000,)), data_of(KEYS[1], (5000,))
    room = np.zeros(PAGE * 4, np.uint8)
    coding = Coding(1, (False,))
    right = room[: encode(want, coding, room)].copy()
    wrong = room[: encode(other, coding, room)].copy()
    wrong[8:16] = right[8:16]
    put_body(tier, KEYS[0], wrong)
    assert hits(tier, KEYS[:1], (5000,)) == [False]
    tier._refusals = type(tier._refusals)(tier.name)
    monkeypatch.setattr(compressed, "decode", Mock(return_value=""))
    with pytest.raises(AssertionError, match="wrong bytes"):
        hits(tier, KEYS[:1], (5000,))


def test_a_tier_that_is_down_says_so_and_is_not_asked_again(
    disk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, data = disk(), rows(10)
    assert all(tier.store(KEYS, data))
    asked = Mock(side_effect=TierDown("no answer"))
    for name in ("probe", "load", "store_for"):
        monkeypatch.setattr(tier._tier, name, asked)
    tier._seen.clear()
    asks: list[Callable[[], object]] = [
        lambda: tier.probe(KEYS),
        lambda: tier.load(KEYS, data),
        lambda: tier.store(KEYS, data),
    ]
    for ask in asks:
        asked.reset_mock()
        with pytest.raises(TierDown, match="no answer"):
            ask()
        assert asked.call_count == 1


# ---------------------------------------------------------------- servers


def test_a_record_of_pieces_may_become_one_value(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis, "PIECE_BYTES", 240_000)
    tier = opened(f"redis:{server.address}?prefix=pieces:&compress=lossless")
    one, several = rows(10), rows(4, 3 * SIZE)
    assert all(tier.store(KEYS, one))
    assert all(tier.store([b"large %d" % i for i in range(4)], several))
    for _ in range(2):
        assert gives_back(tier, KEYS, one)
        assert gives_back(tier, [b"large %d" % i for i in range(4)], several)
    names = list(server.client().scan_iter(match=b"pieces:*"))
    assert sum(b":r:" in name for name in names) == 14
    assert sum(b":p:" in name for name in names) == 4 * 3
    tier.clear()
    tier.close()


def test_a_refusal_is_counted_once(start: Start) -> None:
    server = start(S3Server)
    with credentials():
        tier = opened(server.url("refused", "&compress=lossless"))
        assert works(tier)
        assert tier.report()["refused_records"] == 0
        assert tier.note("epoch") is None
        tier.set_note("epoch", b"7")
        assert tier.note("epoch") == b"7"
        tier.check_store()
        tier.close()
        tier = opened(server.url("refused", "&compress=lossless", bucket="none"))
        with pytest.raises(TierDown):
            fill(tier, KEYS)
        tier.close()


@pytest.mark.parametrize("written", [True, False])
def test_a_check_says_whether_the_store_was_written_to(disk: Any, written: bool) -> None:
    """Otherwise nothing is stored any more after a store has failed."""
    tier = disk()
    tier._tier.check_store = Mock(return_value=written)
    assert tier.check_store() is written


def test_plain_records_are_asked_for_as_without_compression(
    disk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one call: the tier below knows best how many it loads and stores at a time."""
    monkeypatch.setattr(compressed, "_GROUP_BYTES", SIZE)
    tier, data = disk("compress=auto"), rows(10)
    below = Mock(wraps=tier._tier)
    monkeypatch.setattr(tier, "_tier", below)
    assert all(tier.store(KEYS, data))
    assert gives_back(tier, KEYS, data)
    assert (below.store_for.call_count, below.load.call_count) == (1, 1)


def test_groups_are_loaded_at_the_same_time(disk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of four loads, of four groups each: a store may give little to each connection."""
    monkeypatch.setattr(compressed, "_GROUP_BYTES", SIZE)
    tier, data = disk(), rows(4)
    assert all(tier.store(KEYS[:4], data))
    load, met = tier._tier.load, Barrier(16)

    def load_together(*args: Any) -> Any:
        met.wait(10)
        return load(*args)

    monkeypatch.setattr(tier._tier, "load", load_together)
    with ThreadPoolExecutor(4) as pool:
        asks = [pool.submit(gives_back, tier, KEYS[:4], data) for _ in range(4)]
        assert all(ask.result() for ask in asks)


# ---------------------------------------------------------------- auto


@pytest.mark.parametrize(
    ("remote", "write", "read", "on", "then"),
    [
        (True, None, None, True, True),
        (False, None, None, False, False),
        (True, 0.5, None, True, True),
        (False, 0.5, None, False, True),
        (False, 0.5, 0.5, False, True),
        (True, 0.5, 3.0, True, False),
        (True, 3.0, 0.5, True, False),
        (False, 3.0, None, False, False),
        (True, 0.9, 0.9, True, True),  # what is on stays so for longer
        (True, 0.9, 0.9, False, False),
        (False, None, 0.5, False, False),
    ],
)
def test_auto_compresses_for_what_is_slower_than_a_core(
    folder: Path, remote: bool, write: float | None, read: float | None, on: bool, then: bool
) -> None:
    tier = CompressedTier(DiskTier(folder, 1 << 20), "auto", remote=remote)
    assert tier._on is remote
    tier._on, tier._try_at = on, math.inf
    own: Any = tier
    own._writes, own._reads = Mock(value=lambda: write), Mock(value=lambda: read)
    own._encodes = own._decodes = Mock(value=lambda: 1.0)
    assert tier._compressing() is then
    tier.close()


def test_a_core_that_was_busy_is_tried_again(folder: Path) -> None:
    tier = CompressedTier(DiskTier(folder, 1 << 20), "auto", remote=True)
    own: Any = tier
    own._writes, own._encodes = Mock(value=lambda: 2.0), Mock(value=lambda: 1.0)
    own._decodes, own._try_at = own._encodes, math.inf
    assert [tier._compressing() for _ in range(2)] == [False] * 2
    own._try_at = 0.0
    assert [tier._compressing() for _ in range(2)] == [True] * 2
    tier.close()


def test_a_core_is_tried_by_one_thread(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others wait for what it measures; they have what it has begun anew."""
    tries: list[float] = []

    def tried(*rates: Rate) -> float:
        time.sleep(0.05)
        tries.append(try_a_core(*rates))
        return tries[-1]

    monkeypatch.setattr(compressed, "try_a_core", tried)
    tier = CompressedTier(DiskTier(folder, 1 << 20), "auto", remote=False)
    own: Any = tier
    own._writes = Mock(value=lambda: 1.0)
    with ThreadPoolExecutor(4) as pool:
        asks = [pool.submit(tier._compressing) for _ in range(4)]
        assert all(ask.result() for ask in asks)
    assert len(tries) == 1
    tier.close()


def test_auto_measures_what_it_decides_by(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = CompressedTier(DiskTier(folder, 64 << 20), "auto", remote=False)
    data = rows(10, 1 << 20)
    assert "nothing was measured" in tier.report()["compress"]
    for _ in range(2):
        assert all(tier.store(KEYS, data))
        assert gives_back(tier, KEYS, data)
    words = tier.report()["compress"]
    for said in ("the store takes", "gives", "a core compresses", "decompresses"):
        assert f"{said} " in words
    tier.close()


def test_memory_that_others_read_by_themselves_is_not_compressed(folder: Path) -> None:
    tier = CompressedTier(DiskTier(folder, 16 << 20), "auto", remote=True, never=True)
    data = rows(10)
    assert all(tier.store(KEYS, data))
    assert tier.report()["compressed_records"] == 0
    assert "RDMA" in tier.report()["compress"]
    tier.close()


def test_options(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("", "&compress=auto", "&compress=lossless"):
        opened(f"disk:{folder}?capacity=16MiB{text}").close()
    plain = open_tier(f"disk:{folder}?capacity=16MiB&compress=off")
    assert isinstance(plain, DiskTier)
    plain.close()
    with pytest.raises(ConfigError, match=r"compress: .zstd.: say one of lossless, off, auto$"):
        open_tier(f"disk:{folder}?capacity=16MiB&compress=zstd")
    for module in ("kvass.tiers.zstd", "kvass.tiers.planes", "kvass.tiers.compressed"):
        monkeypatch.delitem(sys.modules, module)
    for package in ("compression", "zstandard"):
        monkeypatch.setitem(sys.modules, package, None)
    without = open_tier(f"disk:{folder}?capacity=16MiB")
    assert isinstance(without, DiskTier), "auto needs no library"
    without.close()
    with pytest.raises(ConfigError, match=r"install the extra: kvass\[compress\]"):
        open_tier(f"disk:{folder}?capacity=16MiB&compress=lossless")


def test_a_rate_is_of_the_time_in_which_anything_ran() -> None:
    """Two that ran at the same time took that time once, and what moved nothing took none."""
    now = [0.0]
    rates = [Rate(each, lambda: now[0]) for each in (False, True)]
    size = 8 << 20

    def pause(seconds: float) -> None:
        now[0] += seconds

    for rate in rates:
        assert rate.value() is None
        for _ in range(2):
            inner = partial(rate.timed, partial(pause, 1), lambda _: size)
            rate.timed(inner, lambda _: size)
        rate.timed(lambda: pause(100), lambda _: 0)
    assert [rate.value() for rate in rates] == [2 * size, size]
