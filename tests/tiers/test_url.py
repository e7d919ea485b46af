"""Tier URLs: ours, anybody's, and every way to get one wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvass.config import load
from kvass.errors import ConfigError
from kvass.tiers import Tier, open_tier
from kvass.tiers.disk import DiskTier
from kvass.tiers.url import (
    TierUrl,
    parse_tier_url,
    read_tier_url,
    redacted,
    shown,
    tier_name,
    without_seen,
)
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
    tier = open_tier(f"disk:{folder}?capacity=16MiB&threads=2&compress=off")
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
        ("redis:h:6379?username=me@corp&db=1", "redis:h:6379?username=***&db=1"),
        ("s3:b/p?key_file=/k&region=eu", "s3:b/p?key_file=/k&region=eu"),
        ("m:T?endpoint=http://me:pass@host:80/x&n=1", "m:T?endpoint=***&n=1"),
        ("m:T?secret_key=S&passwd=x&n=1", "m:T?secret_key=***&passwd=***&n=1"),
        ("disk:/a@b?capacity=1GiB", "disk:/a@b?capacity=1GiB"),
    ],
)
def test_people_see_no_secrets(url: str, without: str) -> None:
    assert shown(url) == without
    assert tier_name(url) == without.partition("?")[0]
    assert redacted(without) == without, "nothing more is hidden the second time"


PARTS = ("Zq1x", "Wv8k", "Ypß3")
"""Of each password of the tests below. None may be seen."""
PASSWORDS = st.lists(
    st.text("@:/?#%&= '\"\\,;+.-~é\u2028𝄞", min_size=1, max_size=3), min_size=2, max_size=2
).map(lambda between: PARTS[0] + between[0] + PARTS[1] + between[1] + PARTS[2])
LOGINS = (
    "redis:me:{}@host:6379",
    "redis://me:{}@host:6379/0",
    "mooncake:me:{}@host",
    "s3:me:{}@bucket/prefix",
    "kv:me:{}@host",
    "s3:bucket?endpoint=https://me:{}@host",
    "mooncake:host?metadata=redis://me:{}@host",
    "a.module:Tier?dsn=postgres://me:{}@host/db",
    "redis:host?password={}",
    "redis:host?password={}&db=1",
    "redis:host?db=1&password={}&tls=yes",
    "a.module:Tier?api_token={}",
)


def seen(text: str) -> list[str]:
    return [part for part in PARTS if part in text or repr(part)[1:-1] in text]


@pytest.mark.parametrize("form", LOGINS)
@settings(max_examples=40)
@example("Zq1x&Wv8k=Ypß3")
@example("Zq1x&db=Wv8k?Ypß3")
@given(password=PASSWORDS)
def test_no_part_of_a_password_is_shown(form: str, password: str) -> None:
    """Whatever is in it, also where it was not escaped, and the URL is not what it was to be. A
    plug-in may have any options, so whatever looks like one is."""
    url = form.format(password.replace("=", "") if form.startswith("a.module") else password)
    texts = [shown(url, accepted=False), redacted(f"no answer of {url}")]
    try:
        read_tier_url(url)
        texts += shown(url), tier_name(url)
    except ConfigError as error:
        texts.append(str(error))
    for source in ({"tier": [url]}, {"stop_s": url}, {"log_level": url}):
        try:
            load(source, {})
        except ConfigError as error:
            texts.append(str(error))
    assert [found for text in texts if (found := seen(text))] == []


@settings(max_examples=40)
@given(password=PASSWORDS)
def test_an_escaped_password_is_hidden_wherever_a_library_says_it(password: str) -> None:
    for escaped in (quote(password), quote(password, safe="")):
        url = f"redis:host?password={escaped}&db=1"
        assert read_tier_url(url)[0].options["password"] == password
        assert shown(url) == "redis:host?password=***&db=1"
        for said in (password, escaped, repr(password), str([password])):
            assert seen(without_seen(f"wrong pair me, {said}, and no more")) == []
            assert redacted(f"wrong pair me, {said}, and no more").endswith(", and no more")


def test_the_control_of_the_tests_above() -> None:
    """They see what is shown: a login is masked up to its last @, not its first."""
    assert seen(LOGINS[0].format("@".join(PARTS)).replace(f"{PARTS[0]}@", "***@")) == [*PARTS[1:]]


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
