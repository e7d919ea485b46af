"""What answers in a store's place, and what a store says of single records: S3's real server, and a
web server before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from kvass.errors import ItemRefused, TierDown
from kvass.tiers import open_tier
from tests.support.servers.front import FILE, FORBIDDEN, MISSING, PAGE, Answer, Front, of_s3
from tests.support.servers.s3 import S3Server, credentials
from tests.tiers.conftest import Start
from tests.tiers.records import KEYS, down, fill, hits, keys_of, works

SERVER = S3Server
MANY = keys_of(120)
STRANGERS = {"page": PAGE, "file": FILE, "missing": MISSING, "forbidden": FORBIDDEN}
SCHEMES = {"s3": "", "gcs": "", "azure": "&account=me"}


@pytest.fixture(autouse=True)
def signed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "none")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "c2VjcmV0")
    with credentials():
        yield


def why(ask: Callable[[], object]) -> str:
    with pytest.raises(TierDown) as caught:
        ask()
    assert type(caught.value) is TierDown
    return str(caught.value)


# ---------------------------------------------------------------- what answers is not the store


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("stranger", STRANGERS)
def test_what_any_web_server_says_proves_no_store(scheme: str, stranger: str, start: Start) -> None:
    """``clear`` finds nothing to delete there, and a store that nothing is missing."""
    front = start(Front)
    front.everything = STRANGERS[stranger]
    tier = start(open_tier, front.url("a", SCHEMES[scheme], scheme))
    client_refuses = stranger == "page" and scheme != "s3"
    words = "Header missing" if client_refuses else "<!DOCTYPE html> <html>"
    for ask in (
        tier.check_store,
        lambda: tier.check_store(whole=False),
        tier.clear,
        lambda: tier.note("epoch"),
        lambda: tier.set_note("epoch", b"7"),
    ):
        assert words in why(ask)
    assert words in why(tier.check_store)[:200], "a status has room for it"
    if stranger != "file":  # its HEAD and its PUT are those of a store, until the next check
        assert words in why(lambda: fill(tier, KEYS))
        assert words in why(lambda: hits(tier, KEYS))
    if stranger == "page" and scheme == "s3":
        assert all("<!DOCTYPE" in text for text in down(tier))


def test_a_store_is_a_store_again(server: S3Server, start: Start) -> None:
    front = start(Front, server.endpoint)
    tier = start(open_tier, front.url("again"))
    tier.check_store()
    assert works(tier)
    for stranger in STRANGERS.values():
        front.everything = stranger
        why(tier.check_store)
        front.everything = None
        tier.check_store()
        assert all(hits(tier, KEYS))


def test_an_old_answer_is_no_proof_of_a_write(server: S3Server, start: Start) -> None:
    """A proxy that keeps answers, and says yes to what it does not pass on."""
    front = start(Front, server.endpoint)
    tier = start(open_tier, front.url("old"))
    tier.check_store()
    front.answers["PUT", "check"] = FILE
    tier.check_store(whole=False)
    assert "not read back" in why(tier.check_store)


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, "ExpiredToken"),
        (403, "RequestTimeTooSkewed"),
        (403, "SignatureDoesNotMatch"),
        (403, "InvalidAccessKeyId"),
    ],
)
def test_the_stores_code_is_said_where_an_answer_has_no_body(
    status: int, code: str, start: Start
) -> None:
    front = start(Front)
    front.everything = of_s3(status, code)
    tier = start(open_tier, front.url("codes"))
    assert why(lambda: tier.probe(KEYS)) == f"s3:bucket/codes: {code}: It is so."
    assert all(code in text for text in down(tier))


def test_what_may_not_be_written_is_read(server: S3Server, start: Start) -> None:
    """With and without a note of an earlier check."""
    front = start(Front, server.endpoint)
    writer = start(open_tier, server.url("read-only"))
    assert works(writer)
    for _ in range(2):
        front.answers["PUT", "/"] = of_s3(403, "AccessDenied")
        tier = start(open_tier, front.url("read-only"))
        tier.check_store()
        tier.check_store(whole=False)
        assert all(tier.probe(KEYS))
        assert all(hits(tier, KEYS))
        assert "AccessDenied" in why(partial(fill, tier, KEYS))
        writer.check_store()


def test_a_key_that_may_only_get_loads_what_others_stored(server: S3Server, start: Start) -> None:
    """Without the right to list, S3 also forbids what is absent. A daemon that may write has used
    the store before: the note of its check is the proof of the store."""
    front, absent = start(Front, server.endpoint), keys_of(3, "absent")
    writer = start(open_tier, server.url("get-only"))
    assert works(writer)
    forbidden = [(method, key.hex()) for method in ("GET", "HEAD") for key in absent]
    for ask in [("PUT", "/"), ("POST", "delete"), ("GET", "list"), ("GET", "check"), *forbidden]:
        front.answers[ask] = of_s3(403, "AccessDenied")
    tier = start(open_tier, front.url("get-only"))
    assert "AccessDenied" in why(tier.check_store)
    writer.check_store()
    del front.answers["GET", "check"]
    assert not tier.check_store(), "nothing was written"
    assert tier.probe([*absent, *KEYS]) == hits(tier, [*absent, *KEYS]) == [False] * 3 + [True] * 10
    assert tier.probe(absent) == hits(tier, absent) == [False] * 3, "no trouble of the store"


# ---------------------------------------------------------------- one record


def test_an_archived_record_is_one_miss_until_it_is_stored_again(
    server: S3Server, start: Start
) -> None:
    """A lifecycle rule has moved it: HEAD says 200, and GET 403."""
    tier = start(open_tier, server.url("archived"))
    assert all(fill(tier, MANY))
    lost = MANY[70]
    name = f"archived/records/{lost.hex()}"
    server.put(name, server.get(name), x_amz_storage_class="GLACIER")
    assert tier.probe(MANY) == [True] * 120
    assert sum(hits(tier, MANY)) == 119
    assert hits(tier, [lost]) == [False], "no error of the tier"
    assert tier.probe(MANY).count(False) == 1, "or a store would not write it"
    assert tier.report()["refused_records"] == 2
    [reason] = tier.report()["refusals"]
    assert "InvalidObjectState" in reason
    missing = [key for key, held in zip(MANY, tier.probe(MANY), strict=True) if not held]
    assert fill(tier, missing) == [True]
    assert sum(tier.probe(MANY)) == sum(hits(tier, MANY)) == 120


def test_three_archived_records_in_a_row_end_no_batch(server: S3Server, start: Start) -> None:
    tier = start(open_tier, server.url("row", "&connections=1"))
    assert all(fill(tier, MANY))
    for key in MANY[10:20]:
        server.put(f"row/records/{key.hex()}", b"any", x_amz_storage_class="GLACIER")
    assert sum(hits(tier, MANY)) == 110


def test_a_damaged_record_that_cannot_be_deleted_is_replaced(
    server: S3Server, start: Start
) -> None:
    front = start(Front, server.endpoint)
    tier = start(open_tier, front.url("kept"))
    assert all(fill(tier, KEYS))
    server.put(f"kept/records/{KEYS[3].hex()}", b"damaged")
    front.answers["POST", "delete"] = of_s3(403, "AccessDenied")
    assert sum(hits(tier, KEYS)) == 9
    assert tier.probe(KEYS).count(False) == 1
    assert list(tier.report()["refusals"]) == [
        "it is damaged, and cannot be deleted: AccessDenied: It is so."
    ]
    assert fill(tier, KEYS[3:4]) == [True]
    assert all(hits(tier, KEYS))


@pytest.mark.parametrize("compress", ["auto", "off", "lossless"])
def test_a_store_that_deletes_nothing_takes_records(
    compress: str, server: S3Server, start: Start
) -> None:
    """Also such as nobody has asked for before, which may be there in another form."""
    front = start(Front, server.endpoint)
    front.answers["POST", "delete"] = of_s3(403, "AccessDenied")
    tier = start(open_tier, front.url(f"write-once-{compress}", f"&compress={compress}"))
    assert all(fill(tier, KEYS))
    assert all(hits(tier, KEYS))


@pytest.mark.parametrize("answer", [of_s3(503, "SlowDown"), of_s3(404, "NoSuchUpload")])
def test_a_refusal_of_one_is_no_trouble_of_the_tier(
    answer: Answer, server: S3Server, start: Start
) -> None:
    front = start(Front, server.endpoint)
    tier = start(open_tier, front.url("one"))
    assert all(fill(tier, KEYS))
    front.answers["GET", KEYS[4].hex()] = front.answers["PUT", KEYS[4].hex()] = answer
    assert hits(tier, KEYS[4:5]) == [False]
    assert fill(tier, KEYS[4:5]) == [False]
    assert sum(hits(tier, KEYS)) == sum(fill(tier, KEYS)) == 9


def test_a_note_that_cannot_be_read_is_absent_and_replaced(server: S3Server, start: Start) -> None:
    """Its records are lost; they would be, too, if the note had been deleted."""
    tier = start(open_tier, server.url("note"))
    tier.set_note("epoch", b"old")
    server.put("note/notes/epoch", b"old", x_amz_storage_class="GLACIER")
    server.put("note/notes/check", b"old", x_amz_storage_class="GLACIER")
    assert tier.note("epoch") is None
    tier.set_note("epoch", b"new")
    assert tier.note("epoch") == b"new"


def test_a_request_that_is_refused_has_failed_alone(server: S3Server, start: Start) -> None:
    front = start(Front, server.endpoint)
    tier = start(open_tier, front.url("alone"))
    assert works(tier)
    for method, part in (("GET", "list-type"), ("PUT", "notes/epoch"), ("POST", "delete")):
        front.answers[method, part] = of_s3(403, "AccessDenied")
    for ask in (tier.clear, lambda: tier.set_note("epoch", b"7"), lambda: tier.delete(KEYS)):
        with pytest.raises(ItemRefused, match="AccessDenied"):
            ask()
    assert all(hits(tier, KEYS))
