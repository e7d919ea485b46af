"""The object store tier against a real S3 server: shared, guarded, dead, silent, damaged."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from kvass.errors import ConfigError, TierDown
from kvass.testing.tier_suite import MakeTier, data_of, eventually, room_for, same
from kvass.tiers import open_tier
from kvass.tiers.codec import record_key
from tests.support.servers.s3 import BUCKET, S3Server, credentials
from tests.tiers.records import KEYS, SharedSuite, down, fill, hits, keys_of, works

numbers = count()


@pytest.fixture(autouse=True)
def signed() -> Iterator[None]:
    with credentials():
        yield


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    made = S3Server()
    yield made
    made.close()


@pytest.fixture
def own_server() -> Iterator[S3Server]:
    """One that a test may break."""
    made = S3Server()
    yield made
    made.close()


class TestS3(SharedSuite):
    @pytest.fixture
    def make_tier(self, server: S3Server) -> MakeTier:
        url = server.url(f"suite/{next(numbers)}")
        return lambda: open_tier(url)


def test_gcs(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Google's XML interface is near enough to S3's for the same server; deletes come singly."""
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "none")
    tier = open_tier(f"gcs:{BUCKET}/gcs?endpoint={server.endpoint}&allow_http=yes")
    tier.set_note("epoch", b"7")
    assert works(tier)
    tier.delete(KEYS[:3])
    assert hits(tier, KEYS) == [False] * 3 + [True] * 7
    tier.clear()
    assert not any(tier.probe(KEYS))
    assert tier.note("epoch") == b"7"
    tier.close()


# ---------------------------------------------------------------- sharing


def test_a_clear_leaves_others_alone(server: S3Server) -> None:
    prefixes = ("iso", "iso2", "is", "iso/sub")
    tiers = [open_tier(server.url(prefix)) for prefix in prefixes]
    for tier, prefix in zip(tiers, prefixes, strict=True):
        assert all(fill(tier, KEYS, version=len(prefix)))
        tier.set_note("of", prefix.encode())
    server.put("iso/recordsnot", b"ours")
    tiers[0].clear()
    assert not any(tiers[0].probe(KEYS))
    for tier, prefix in zip(tiers, prefixes, strict=True):
        assert tier.note("of") == prefix.encode()
        if prefix != "iso":
            assert all(hits(tier, KEYS, versions=9))
        tier.close()
    assert server.get("iso/recordsnot") == b"ours"


def test_a_clear_of_more_than_one_listing(server: S3Server) -> None:
    tier = open_tier(server.url("many"))
    many = keys_of(1100)
    assert all(fill(tier, many, (1,)))
    assert sum(tier.probe(many)) == 1100
    tier.clear()
    assert not any(tier.probe(many))
    assert server.names("many/") == []
    tier.close()


# ---------------------------------------------------------------- damage


def _name(prefix: str, key: bytes) -> str:
    return f"{prefix}/records/{key.hex()}"


def test_a_damaged_object_is_a_miss_and_removed(server: S3Server) -> None:
    tier = open_tier(server.url("damage"))
    name = _name("damage", KEYS[3])
    assert all(fill(tier, KEYS))
    good = server.get(name)

    def missed(value: bytes) -> None:
        server.put(name, value)
        assert hits(tier, KEYS).count(False) == 1
        assert name not in server.names("damage/")
        assert all(fill(tier, KEYS[3:4]))
        assert all(hits(tier, KEYS))

    for at in (0, 9, 33, 60, 70, 100, 5000, len(good) - 1):
        value = bytearray(good)
        value[at] ^= 1
        missed(bytes(value))
    for cut in (0, 1, 5, 70, 5000, len(good) - 1):
        missed(good[:cut])
    missed(good + b"\0")
    missed(server.get(_name("damage", KEYS[4])))
    tier.close()


# ---------------------------------------------------------------- trouble


def test_a_server_that_stands_still(own_server: S3Server) -> None:
    """The whole batch, which is many times what is asked at once, takes one silence."""
    tier = open_tier(own_server.url("still", "&timeout_s=2&connections=4"))
    many = keys_of(400)
    assert all(fill(tier, many[:50]))
    own_server.pause(True)
    asks: list[Callable[[], object]] = [
        lambda: tier.probe(many),
        lambda: hits(tier, many),
        lambda: fill(tier, many),
    ]
    for ask in asks:
        with pytest.raises(TierDown, match="Timeout"):
            ask()
    own_server.pause(False)
    assert hits(tier, many[:51]) == [True] * 50 + [False]
    tier.close()


def test_a_server_killed_in_the_middle_of_a_load(own_server: S3Server) -> None:
    tier = open_tier(own_server.url("middle", "&timeout_s=4&connections=2"))
    shape = (8 << 20,)
    keys = keys_of(12)
    assert all(fill(tier, keys, shape))
    into = [room_for(shape) for _ in keys]
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(tier.load, keys, into)
        eventually(lambda: bool((into[0][0][:64] != 0xA5).any()), 60)
        own_server.kill()
        try:
            which = loading.result(timeout=60)
        except TierDown:
            which = [False] * len(keys)
    assert not all(which)
    before = [shards[0].copy() for shards in into]
    for key, shards, held in zip(keys, into, which, strict=True):
        assert not held or same(shards, data_of(key, shape))
    own_server.start()
    assert hits(tier, keys, shape) == [False] * len(keys)
    assert all(fill(tier, keys, shape))
    assert all(hits(tier, keys, shape))
    assert all((now[0] == then).all() for now, then in zip(into, before, strict=True)), (
        "a load that had returned went on writing"
    )
    tier.close()


def test_an_unknown_bucket_is_said_until_it_is_there(server: S3Server) -> None:
    tier = open_tier(server.url("some", bucket="later"))
    assert all("NoSuchBucket" in text for text in down(tier, probe=False))
    server.ask("PUT", "later")
    assert tier.probe(KEYS) == [False] * 10
    assert tier.note("epoch") is None
    assert all(fill(tier, KEYS))
    assert all(hits(tier, KEYS))
    tier.close()


class NotFound(BaseHTTPRequestHandler):
    """What any web server says of what it does not have."""

    def do_any(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_error(404)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_any  # noqa: N815

    def log_message(self, *_: object) -> None: ...


@pytest.mark.parametrize("scheme", ["s3", "gcs"])
def test_what_is_not_there_is_no_trouble_until_something_is_stored(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Google says 404 of a delete, too. A server of another kind says so of everything."""
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "none")
    with ThreadingHTTPServer(("127.0.0.1", 0), NotFound) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{other.server_port}"
        tier = open_tier(f"{scheme}:bucket?endpoint={endpoint}&allow_http=yes")
        assert not any(tier.probe(KEYS))
        assert not any(hits(tier, KEYS))
        assert tier.note("epoch") is None
        if scheme == "gcs":
            tier.delete(KEYS)
        for ask in (lambda: fill(tier, KEYS), lambda: tier.set_note("epoch", b"7")):
            with pytest.raises(TierDown, match="404"):
                ask()
        tier.close()
        other.shutdown()


def test_wrong_credentials_are_said_and_right_ones_work(own_server: S3Server) -> None:
    key, secret = own_server.guard()
    url = own_server.url("guarded", "&timeout_s=5")
    for wrong in (("AKIAWRONG", secret), (key, "wr0ngs3cret")):
        with credentials(*wrong):
            tier = open_tier(url)
        for text in down(tier):
            assert re.search("403|InvalidAccessKeyId|SignatureDoesNotMatch", text)
            assert not any(part in text for part in (key, secret, *wrong))
        tier.close()
    with credentials(key, secret):
        tier = open_tier(url)
    assert all(fill(tier, KEYS))
    assert all(hits(tier, KEYS))
    tier.close()


@pytest.mark.parametrize(
    "url",
    [
        "s3:bucket?endpoint=http://127.0.0.1:1&allow_http=yes",
        "gcs:bucket/a?endpoint=http://127.0.0.1:1&allow_http=yes",
        "azure:bucket/a?account=me&endpoint=http://127.0.0.1:1&allow_http=yes",
    ],
)
def test_nobody_there_at_the_start(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "none")
    monkeypatch.setenv("AZURE_SKIP_SIGNATURE", "true")
    tier = open_tier(url + "&timeout_s=2")
    assert all("Connection refused" in text for text in down(tier))
    tier.close()


@pytest.mark.parametrize(
    ("host", "why"), [("127.0.0.1:1", "Connection refused"), ("no.such.invalid", "dns error")]
)
def test_a_status_has_room_for_the_reason(host: str, why: str) -> None:
    """Names of what is asked for would take all of it."""
    tier = open_tier(f"s3:bucket/a?endpoint=http://{host}&allow_http=yes&timeout_s=2")
    key = record_key(bytes(32), 1, 0, bytes(32))
    asks = lambda: tier.probe([key]), lambda: tier.note("epoch." + "0" * 64)
    for ask in asks:
        with pytest.raises(TierDown) as caught:
            ask()
        assert why in str(caught.value)[:200]
        assert host in str(caught.value)
    tier.close()


# ---------------------------------------------------------------- bounds


def connections_to(port: int) -> int:
    """Of this machine's, open or being opened."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    ours = [line.split() for line in lines]
    return sum(one[2].endswith(f":{port:04X}") and one[3] in ("01", "02") for one in ours)


def test_connections_are_bounded(own_server: S3Server) -> None:
    tier = open_tier(own_server.url("few", "&timeout_s=60&connections=5"))
    many = keys_of(60)
    assert all(fill(tier, many))
    eventually(lambda: connections_to(own_server.port) == 0, 60)
    own_server.pause(True)
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(tier.probe, many) for _ in range(3)]
        eventually(lambda: connections_to(own_server.port) == 5, 60)
        for _ in range(20):
            assert connections_to(own_server.port) <= 5
            threading.Event().wait(0.01)
        own_server.pause(False)
        assert all(all(one.result(timeout=60)) for one in asked)
    tier.close()


def peak_growth(work: Callable[[], object]) -> int:
    """By how many bytes this process was larger at most than when ``work`` began."""

    def of(field: str) -> int:
        text = Path("/proc/self/status").read_text()
        found = re.search(rf"{field}:\s+(\d+) kB", text)
        assert found
        return int(found[1]) << 10

    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = of("VmRSS")
    work()
    return of("VmHWM") - before


def test_memory_in_flight_is_bounded(server: S3Server) -> None:
    """256 MiB at once, of which it may hold 64, and what the client and the allocator add."""
    tier = open_tier(server.url("memory", "&timeout_s=60"))
    keys = keys_of(16)
    shard = np.arange(16 << 20, dtype=np.uint64).astype(np.uint8)
    into = room_for((len(shard),))
    assert peak_growth(lambda: tier.store(keys, [[shard]] * 16)) < 128 << 20
    assert peak_growth(lambda: tier.load(keys, [into] * 16)) < 128 << 20
    assert same(into, [shard])
    tier.clear()
    tier.close()


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("url", "variable", "value", "says"),
    [
        ("s3:bucket", "AWS_SECRET_ACCESS_KEY", "s3cret\n", "AWS_SECRET_ACCESS_KEY has a line"),
        ("gcs:bucket", "GOOGLE_BEARER_TOKEN", "s3cret\n", "GOOGLE_BEARER_TOKEN has a line"),
        ("gcs:bucket", "GOOGLE_SERVICE_ACCOUNT_KEY", "s3cret", "decode"),
        ("azure:bucket?account=me", "AZURE_STORAGE_ACCOUNT_KEY", "s3cret", "Invalid Access Key"),
        ("azure:bucket?account=me", "AZURE_STORAGE_SAS_KEY", "s3cret", "SAS"),
    ],
)
def test_credentials_that_cannot_be_any_are_refused_and_not_repeated(
    url: str, variable: str, value: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError) as caught:
        open_tier(url)
    assert says in str(caught.value)
    assert "s3cret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_signature_in_an_address_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_SAS_KEY", "sv=2020-08-04&sig=s3cret")
    url = "azure:bucket?account=me&endpoint=http://127.0.0.1:1&allow_http=yes&timeout_s=2"
    tier = open_tier(url)
    assert not any("s3cret" in text for text in down(tier))
    tier.close()


def test_the_urls_endpoint_goes_before_the_environments(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    tier = open_tier(server.url("mine"))
    assert all(fill(tier, KEYS[:1]))
    tier.close()


def test_without_the_package_the_extra_is_named() -> None:
    """Asked of a process whose packages are not those of this one."""
    code = """
import sys
class Without:
    def find_spec(self, name, *_):
        if name == "obstore":
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Without())
from kvass.tiers import open_tier
from kvass.tiers.codec import record_key
open_tier("s3:bucket")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "install the extra: kvass[s3]" in done.stderr


def test_the_usual_spelling_is_understood(server: S3Server) -> None:
    for url in (server.url("slashes"), server.url("slashes").replace("s3:", "s3://", 1)):
        tier = open_tier(url)
        assert all(fill(tier, KEYS[:1]))
        tier.close()
    assert len(server.names("slashes/")) == 1
