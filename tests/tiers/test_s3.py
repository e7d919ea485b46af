"""The object store tier against a real S3 server: shared, guarded, dead, silent, damaged."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvass.errors import ConfigError, TierDown
from kvass.testing.tier_suite import data_of, eventually, room_for, same
from kvass.tiers import open_tier
from kvass.tiers.codec import record_key
from tests.support.servers.forwarder import Forwarder
from tests.support.servers.front import Answer, Front
from tests.support.servers.s3 import BUCKET, S3Server, credentials
from tests.tiers.conftest import Start
from tests.tiers.records import KEYS, OpenAt, Raw, SharedSuite, down, fill, hits, keys_of, works

SERVER = S3Server


@pytest.fixture(autouse=True)
def signed() -> Iterator[None]:
    with credentials():
        yield


class TestS3(SharedSuite):
    @pytest.fixture
    def open_at(self, server: S3Server) -> OpenAt:
        return lambda prefix: open_tier(server.url(f"suite/{prefix}"))

    @pytest.fixture
    def raw(self, server: S3Server) -> Raw:
        name = "suite/{}/records/{}".format
        return Raw(
            lambda prefix, key: server.get(name(prefix, key.hex())),
            lambda prefix, key, value: server.put(name(prefix, key.hex()), value),
        )


def test_gcs(server: S3Server, monkeypatch: pytest.MonkeyPatch, start: Start) -> None:
    """Google's XML interface is near enough to S3's for the same server; deletes come singly."""
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "none")
    tier = start(open_tier, f"gcs:{BUCKET}/gcs?endpoint={server.endpoint}&allow_http=yes")
    tier.set_note("epoch", b"7")
    assert works(tier)
    tier.delete(KEYS[:3])
    assert hits(tier, KEYS) == [False] * 3 + [True] * 7
    tier.clear()
    assert not any(tier.probe(KEYS))
    assert tier.note("epoch") == b"7"


def test_a_clear_of_more_than_one_listing(server: S3Server, start: Start) -> None:
    tier = start(open_tier, server.url("many"))
    many = keys_of(1100)
    assert all(fill(tier, many, (1,)))
    assert len(server.names("many/")) == 1000, "of one listing"
    tier.clear()
    assert not any(tier.probe(many[::100]))
    assert server.names("many/records/") == []


# ---------------------------------------------------------------- trouble


def test_a_server_that_stands_still(start: Start) -> None:
    """The whole batch, which is many times what is asked at once, takes one silence."""
    server = start(S3Server)
    tier = start(open_tier, server.url("still", "&timeout_s=2&connections=4"))
    many = keys_of(400)
    assert all(fill(tier, many[:50]))
    server.pause(True)
    asks: list[Callable[[], object]] = [
        lambda: tier.probe(many),
        lambda: hits(tier, many),
        lambda: fill(tier, many),
    ]
    for ask in asks:
        with pytest.raises(TierDown, match="Timeout"):
            ask()
    server.pause(False)
    assert hits(tier, many[:51]) == [True] * 50 + [False]


def test_a_server_killed_in_the_middle_of_a_load(start: Start) -> None:
    server = start(S3Server)
    tier = start(open_tier, server.url("middle", "&timeout_s=4&connections=2"))
    shape = (8 << 20,)
    keys = keys_of(12)
    assert all(fill(tier, keys, shape))
    into = [room_for(shape) for _ in keys]
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(tier.load, keys, into)
        eventually(lambda: bool((into[0][0][:64] != 0xA5).any()), 60)
        server.kill()
        try:
            which = loading.result(timeout=60)
        except TierDown:
            which = [False] * len(keys)
    assert not all(which)
    before = [shards[0].copy() for shards in into]
    for key, shards, held in zip(keys, into, which, strict=True):
        assert not held or same(shards, data_of(key, shape))
    server.start()
    assert hits(tier, keys, shape) == [False] * len(keys)
    assert all(fill(tier, keys, shape))
    assert all(hits(tier, keys, shape))
    assert all((now[0] == then).all() for now, then in zip(into, before, strict=True)), (
        "a load that had returned went on writing"
    )


@pytest.mark.parametrize("status", [503, 307])
def test_a_balancer_that_has_servers_again(server: S3Server, start: Start, status: int) -> None:
    """Behind one address. A connection stays with who answered it first."""
    balancer = start(Front)
    balancer.everything = Answer(status, b"", (("Location", "http://127.0.0.1:1/"),))
    front = start(Forwarder, ("127.0.0.1", balancer.port))
    url = server.url(f"front{status}").replace(f":{server.port}", f":{front.port}")
    tier = start(open_tier, url)
    for ask in (lambda: fill(tier, KEYS), lambda: tier.note("epoch")):
        with pytest.raises(TierDown):
            ask()
    front.target = "127.0.0.1", server.port
    assert works(tier)


def test_an_unknown_bucket_is_said_until_it_is_there(server: S3Server, start: Start) -> None:
    tier = start(open_tier, server.url("some", bucket="later"))
    assert all("NoSuchBucket" in text for text in down(tier, probe=False))
    server.ask("PUT", "later")
    assert tier.probe(KEYS) == [False] * 10
    assert tier.note("epoch") is None
    assert works(tier)


def test_wrong_credentials_are_said_and_right_ones_work(start: Start) -> None:
    server = start(S3Server)
    key, secret = server.guard()
    url = server.url("guarded", "&timeout_s=5")
    for wrong in (("AKIAWRONG", secret), (key, "wr0ngs3cret")):
        with credentials(*wrong):
            tier = start(open_tier, url)
        for text in down(tier):
            assert re.search("403|InvalidAccessKeyId|SignatureDoesNotMatch", text)
            assert not any(part in text for part in (key, secret, *wrong))
    with credentials(key, secret):
        tier = start(open_tier, url)
    assert works(tier)


@pytest.mark.parametrize(
    ("host", "why"), [("127.0.0.1:1", "Connection refused"), ("no.such.invalid", "dns error")]
)
def test_a_status_has_room_for_the_reason(host: str, why: str, start: Start) -> None:
    """Names of what is asked for would take all of it."""
    tier = start(open_tier, f"s3:bucket/a?endpoint=http://{host}&allow_http=yes&timeout_s=2")
    key = record_key(bytes(32), 1, 0, bytes(32))
    asks: list[Callable[[], object]] = [
        lambda: tier.probe([key]),
        lambda: tier.note("epoch." + "0" * 64),
    ]
    for ask in asks:
        with pytest.raises(TierDown) as caught:
            ask()
        assert why in str(caught.value)[:200]
        assert host in str(caught.value)


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


def test_a_signature_in_an_address_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch, start: Start
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_SAS_KEY", "sv=2020-08-04&sig=s3cret")
    url = "azure:bucket?account=me&endpoint=http://127.0.0.1:1&allow_http=yes&timeout_s=2"
    tier = start(open_tier, url)
    assert not any("s3cret" in text for text in down(tier))


def test_the_urls_endpoint_goes_before_the_environments(
    server: S3Server, monkeypatch: pytest.MonkeyPatch, start: Start
) -> None:
    for name in ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    tier = start(open_tier, server.url("mine"))
    assert all(fill(tier, KEYS[:1]))


@pytest.mark.parametrize(
    ("prefix", "endpoint", "url"),
    [
        ("AWS_", "AWS_ENDPOINT_URL", f"s3:{BUCKET}/environment"),
        ("AWS_", "AWS_ENDPOINT_URL_S3", f"s3:{BUCKET}/environment"),
        ("GOOGLE_", "GOOGLE_BASE_URL", f"gcs:{BUCKET}/environment"),
        ("AZURE_", "AZURE_STORAGE_ENDPOINT", f"azure:{BUCKET}/environment?account=me"),
    ],
)
def test_an_endpoint_of_the_environment_is_allowed_there_too(
    prefix: str,
    endpoint: str,
    url: str,
    server: S3Server,
    monkeypatch: pytest.MonkeyPatch,
    start: Start,
) -> None:
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "none")
    monkeypatch.setenv("AZURE_SKIP_SIGNATURE", "true")
    monkeypatch.setenv(endpoint, server.endpoint)
    with pytest.raises(ConfigError) as caught:
        open_tier(url)
    how = f"{prefix}ALLOW_HTTP=true, or allow_http=yes in the tier's URL, allows it"
    assert f": {endpoint}: http is not encrypted; {how}" in str(caught.value)
    monkeypatch.setenv(f"{prefix}ALLOW_HTTP", "true")
    tier = start(open_tier, url)
    if prefix == "AZURE_":  # it is no server of Azure's, and can be asked
        with pytest.raises(TierDown, match=r"40[0-9]|50[0-9]"):
            fill(tier, KEYS)
    else:
        assert works(tier)


@pytest.mark.parametrize(
    "endpoint", ["localhost:9000", "http://me:s3/c@ret@host", "https://h/?s3cret"]
)
def test_an_endpoint_that_is_none_is_not_repeated(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client panics at some of them, and says others in its errors."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(ConfigError, match="AWS_ENDPOINT_URL: write https://HOST") as caught:
        open_tier("s3:bucket?allow_http=yes")
    assert endpoint not in str(caught.value)
    assert "ret" not in str(caught.value)


def test_a_proxy_of_the_environment_is_used_and_not_repeated(
    server: S3Server, monkeypatch: pytest.MonkeyPatch, start: Start
) -> None:
    monkeypatch.setenv("AWS_PROXY_URL", "http://me:s3cr@t@127.0.0.1:1")
    tier = start(open_tier, server.url("proxied", "&timeout_s=2"))
    assert not any("s3cr" in text or "@t" in text for text in down(tier))
    tier.close()
    monkeypatch.setenv("AWS_PROXY_URL", "http://me:s3cr@[t")
    with pytest.raises(ConfigError, match=r"the environment has proxy_url") as caught:
        open_tier(server.url("proxied"))
    assert "s3cr" not in str(caught.value)


def test_requests_and_bytes_in_flight_are_bounded(start: Start) -> None:
    """By the pool, as ``test_worker_pool.py`` shows."""
    tier = start(open_tier, "s3:bucket?connections=5&compress=off")
    assert (tier._pool._size, tier._pool._max_bytes) == (5, 64 << 20)


def test_the_usual_spelling_is_understood(server: S3Server, start: Start) -> None:
    for url in (server.url("slashes"), server.url("slashes").replace("s3:", "s3://", 1)):
        tier = start(open_tier, url)
        assert all(fill(tier, KEYS[:1]))
    assert len(server.names("slashes/")) == 1
