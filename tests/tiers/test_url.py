"""Tier URLs: ours, anybody's, and every way to get one wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvass.errors import ConfigError
from kvass.tiers import Tier, open_tier
from kvass.tiers.disk import DiskTier
from kvass.tiers.url import TierUrl, parse_tier_url, redacted, tier_name
from tests.support.tiers.memory import MemoryTier
from tests.tiers.records import down


class Sized(MemoryTier):
    """A plug-in with an option."""

    def __init__(self, size: str = "0") -> None:
        super().__init__()
        self.size = size


class Silent(Exception):
    """Cannot even say what is wrong."""

    def __str__(self) -> str:
        raise RuntimeError


def broken(how: str, password: str = "") -> object:
    if how == "silent":
        raise Silent
    if how == "empty":
        raise ValueError
    if how == "os":
        raise PermissionError(13, "Permission denied")
    raise ValueError(f"no route to\nredis:h?password={password}")


def no_tier() -> object:
    return object()


def test_a_disk_opens(folder: Path) -> None:
    tier = open_tier(f"disk:{folder}?capacity=16MiB&threads=2")
    assert isinstance(tier, DiskTier)
    assert isinstance(tier, Tier)
    tier.close()


def test_parts() -> None:
    assert parse_tier_url("disk:/a/b%3Fc?capacity=1GiB&verify=a%26b") == TierUrl(
        scheme="disk", where="/a/b?c", options={"capacity": "1GiB", "verify": "a&b"}
    )
    assert parse_tier_url("my.mod:It") == TierUrl(scheme="my.mod", where="It", options={})


def test_a_plug_in_opens() -> None:
    tier = open_tier(f"{__name__}:Sized?size=3")
    assert type(tier).__name__ == "Sized"
    assert getattr(tier, "size", None) == "3"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "SCHEME:WHERE"),
        ("disk", "SCHEME:WHERE"),
        ("disk:", "SCHEME:WHERE"),
        (":/path", "SCHEME:WHERE"),
        ("disc:/path?capacity=1GiB", "unknown scheme 'disc'"),
        ("https://host/", "unknown scheme 'https'"),
        ("disk:FOLDER", "capacity"),
        ("disk:FOLDER?", "capacity"),
        ("disk:FOLDER?capacity=1GiB&size=3", "'size'; its options: capacity, threads"),
        ("disk:FOLDER?capacity=1GiB&capacity=2GiB", "twice"),
        ("disk:FOLDER?capacity", "name=value"),
        ("disk:FOLDER?capacity=many", "like 8GiB"),
        ("disk:FOLDER?capacity=1KiB", "not one row"),
        ("disk:FOLDER?capacity=900000TiB", "the disk has"),
        ("disk:FOLDER?capacity=1GiB&threads=0", "threads: '0': Expected `int` >= 1"),
        ("disk:FOLDER?capacity=1GiB&threads=x", "threads: 'x': Expected `int`"),
        ("disk:FOLDER?capacity=1GiB&verify=once", "'verify'; its options: capacity, threads"),
        ("disk:FOLDER?capacity=1GiB&write=2TB", "write: '2TB': write it like 2TB/day"),
        ("disk:FOLDER?capacity=1GiB&write=2TB/hour", "write it like 2TB/day"),
        ("disk:FOLDER?capacity=1GiB&write=0/day", "write it like 2TB/day"),
        ("disk:FOLDER?capacity=1GiB&write=many/day", "write it like 2TB/day"),
        ("disk:FOLDER/absent?capacity=1GiB", "no such folder"),
        ("disk:FOLDER/lock?capacity=1GiB", "no such folder"),
        ("no.such.module:Tier", "No module named"),
        ("kvass.tiers.base:Nothing", "Nothing"),
        ("kvass.tiers.base:MAX_SHARDS", "cannot be called"),
        (f"{__name__}:no_tier", "no Tier"),
        (f"{__name__}:Sized?colour=red", "unexpected keyword argument 'colour'"),
        (f"{__name__}:broken?how=silent", "cannot be opened: Silent"),
        (f"{__name__}:broken?how=empty", "cannot be opened: ValueError"),
        (
            f"{__name__}:broken?how=so&password=hunter2",
            "cannot be opened: ValueError: no route to redis:h?password=***",
        ),
        ("tests.tiers.no_module:Tier", "cannot be opened: ZeroDivisionError"),
        ("disk:FOLDER/\udcff?capacity=1GiB", "not UTF-8"),
        ("disk:FOLDER/%ff?capacity=1GiB", "not UTF-8"),
        ("disk:FOLDER?capacity=\udcff", "not UTF-8"),
        ("disk:FOLDER/%00?capacity=1GiB", "NUL"),
        ("redis:host:port", "no port"),
        ("redis:host:0", "no port"),
        ("redis:host?db=x", "db: 'x'"),
        ("redis:host?ttl_s=-1", "ttl_s"),
        ("redis:host?timeout_s=0", "timeout_s"),
        ("redis:host?prefix=", "prefix"),
        ("redis:host?tls=maybe", "tls"),
        ("redis:/socket?tls=yes", "unix socket"),
        ("redis:/socket?cluster=yes", "host and port"),
        ("redis:host?cluster=yes&db=1", "db"),
        ("redis:host?colour=red", "its options: db, prefix"),
        ("redis://user:hunter2@host:6379", "instead of a URL"),
        ("redis:user:hunter2@host:6379", "instead of a URL"),
        ("s3:/prefix", "is no bucket"),
        ("s3:b", "is no bucket"),
        ("s3:bucket/", "is no prefix"),
        ("s3:bucket/a//b", "is no prefix"),
        ("s3:bucket/a/../b", "is no prefix"),
        ("s3:bucket/a b", "is no prefix"),
        ("s3:bucket/" + "a" * 401, "at most 400"),
        ("s3:bucket/a/records", "names of ours"),
        ("s3:bucket?timeout_s=0", "timeout_s: '0'"),
        ("s3:bucket?timeout_s=1.5", "timeout_s: '1.5'"),
        ("s3:bucket?region=eu%0Awest", "region: 'eu\\nwest'"),
        ("s3:bucket?connections=257", "connections: '257': Expected `int` <= 256"),
        ("s3:bucket?allow_http=maybe", "allow_http: 'maybe'"),
        ("s3:bucket?endpoint=http://host", "allow_http=yes"),
        ("s3:bucket?endpoint=host:80", "write https://"),
        ("s3:bucket?endpoint=https://me:hunter2@host", "write https://"),
        ("s3:bucket?secret_access_key=x", "its options: endpoint, allow_http"),
        ("gcs:bucket?region=x", "its options: endpoint, allow_http"),
        ("azure:container", "ccount"),
        ("mooncake:host:port", "no port"),
        ("mooncake:host:0", "no port"),
        ("mooncake::50051", "no port"),
        ("mooncake:host?protocol=pigeon", "protocol"),
        ("mooncake:host?metadata=", "metadata"),
        ("mooncake:host?segment=much", "segment"),
        ("mooncake:host?segment=1KiB", "segment: 1KiB is less than 16MiB"),
        ("mooncake:host?bounce=1GiB", "unknown option 'bounce'"),
        ("mooncake:host?prefix=", "prefix"),
        ("mooncake:host?prefix=a*", "prefix"),
        ("mooncake:host?timeout_s=31", "<= 30"),
    ],
)
def test_mistakes_are_one_clear_line(folder: Path, url: str, says: str) -> None:
    (folder / "lock").touch()
    with pytest.raises(ConfigError) as caught:
        open_tier(url.replace("FOLDER", str(folder)))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "hunter2" not in str(caught.value)
    str(caught.value).encode()


def test_what_the_system_refuses_is_left_to_say_so() -> None:
    with pytest.raises(PermissionError):
        open_tier(f"{__name__}:broken?how=os")


def test_a_folder_of_a_live_tier_is_refused_and_free_afterwards(folder: Path) -> None:
    url = f"disk:{folder}?capacity=16MiB"
    tier = open_tier(url)
    with pytest.raises(ConfigError, match="in use by process"):
        open_tier(url)
    tier.close()
    open_tier(url).close()


def test_a_folder_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be"):
        open_tier("disk:/sys/kernel?capacity=16MiB")


@pytest.mark.parametrize(
    ("url", "without"),
    [
        ("redis:h:6379?password=hunter2&db=1", "redis:h:6379?password=***&db=1"),
        (
            "s3:b/p?key_id=A&secret_key=S",
            "s3:b/p?key_id=***&secret_key=***",
        ),
        (
            "m:T?endpoint=http://me:pass@host:80/x&n=1",
            "m:T?endpoint=http://me:***@host:80/x&n=1",
        ),
        ("redis:me:pass@host:1", "redis:***@host:1"),
        ("disk:/a@b?capacity=1GiB", "disk:/a@b?capacity=1GiB"),
    ],
)
def test_people_see_no_secrets(url: str, without: str) -> None:
    assert redacted(url) == without
    assert tier_name(url) == without.partition("?")[0]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis:/no/such/socket", "No such file"),
        ("redis:127.0.0.1:1?cluster=yes&timeout_s=1", "127.0.0.1:1"),
        ("mooncake:127.0.0.1:1", "master"),
        ("mooncake:no.such.host.invalid:50051?timeout_s=1", "master"),
        *(
            (f"{bucket}endpoint=http://127.0.0.1:1&allow_http=yes&timeout_s=2", "refused")
            for bucket in ("s3:bucket?", "gcs:bucket/a?", "azure:bucket/a?account=me&")
        ),
    ],
)
def test_a_server_that_is_not_there_is_said_by_every_call(
    url: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "GOOGLE_BEARER_TOKEN": "none",
        "AZURE_SKIP_SIGNATURE": "true",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    tier = open_tier(url)
    assert all(says in text for text in down(tier))
    tier.close()


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "kvass.tiers.object_store", raising=False)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"install the extra: kvass\[s3\]"):
        open_tier("s3:bucket")
