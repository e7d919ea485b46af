"""Encrypted records in a folder, a Redis server and an S3 server: right bytes or a miss."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from kvass.errors import ConfigError, ItemRefused, TierDown
from kvass.testing import TierSuite
from kvass.testing.tier_suite import LARGE, ROOM, MakeTier, data_of
from kvass.tiers import codec, encrypted, encryption, open_tier, redis
from kvass.tiers.base import DividedTier, Tier
from kvass.tiers.disk import DiskTier
from kvass.tiers.encrypted import EncryptedTier
from kvass.tiers.key_file import KeyFile
from kvass.types import PAGE
from tests.support.servers.redis import RedisServer
from tests.support.servers.s3 import S3Server, credentials
from tests.tiers.conftest import Start
from tests.tiers.records import KEYS, fill, hits, works

OLD, NEW, OTHER = "11" * 32, "22" * 32, "33" * 32
SERVER = RedisServer
numbers = count()


def write_keys(path: Path, *keys: str) -> None:
    """Replace the file at once, as a rotation should."""
    new = path.with_suffix(".new")
    new.write_text("# a comment\n" + "\n".join(keys) + "\n")
    new.chmod(0o600)
    new.replace(path)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    write_keys(path, OLD)
    return path


@pytest.fixture
def disk(folder: Path, key_file: Path) -> Iterator[Callable[..., EncryptedTier]]:
    opened: list[Tier] = []

    def open_(path: Path = key_file) -> EncryptedTier:
        opened.append(open_tier(f"disk:{folder}?capacity=16MiB&key_file={path}&compress=off"))
        assert isinstance(opened[-1], EncryptedTier)
        return opened[-1]

    yield open_
    for tier in opened:
        tier.close()


class TestEncryptedDisk(TierSuite):
    @pytest.fixture
    def make_tier(self, folder: Path, key_file: Path) -> MakeTier:
        return lambda: open_tier(f"disk:{folder}?capacity={ROOM}&key_file={key_file}")


def test_redis(server: RedisServer, key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, and records in pieces. A byte that is flipped in either is a miss."""
    monkeypatch.setattr(redis, "PIECE_BYTES", 8 * PAGE)
    tier = open_tier(f"redis:{server.address}?prefix=enc:&key_file={key_file}&compress=off")
    assert isinstance(tier, EncryptedTier)
    large = (LARGE, LARGE // 3)
    assert works(tier)
    assert all(fill(tier, [b"large"], large))
    assert all(hits(tier, [b"large"], large))
    client: Any = server.client()
    names = list(client.scan_iter(match=b"enc:*"))
    assert not any(key in name for key in (*KEYS, b"large") for name in names)
    for name in names:
        if b":r:" in name or name.endswith(b":0"):
            raw = client.get(name)
            client.set(name, raw[:-1] + bytes([raw[-1] ^ 1]))
    assert not any(hits(tier, KEYS))
    assert not any(hits(tier, [b"large"], large))
    assert works(tier)
    write_keys(key_file, OTHER)
    assert not any(tier.probe(KEYS))
    assert tier.report()["other_keys"] == 1
    tier.clear()
    tier.close()


def test_s3(start: Start, key_file: Path) -> None:
    server = start(S3Server)
    with credentials():
        tier = open_tier(server.url("encrypted", f"&key_file={key_file}&compress=off"))
        assert isinstance(tier, EncryptedTier)
        assert works(tier)
        write_keys(key_file, OTHER)
        assert not any(tier.probe(KEYS))
        assert tier.report()["other_keys"] == 1
        assert not any(hits(tier, KEYS))
        write_keys(key_file, OLD)
        assert all(hits(tier, KEYS))
        assert tier.report()["other_keys"] == 0
        tier.close()
        assert not any(key.hex() in name for key in KEYS for name in server.names())


def test_a_folder_has_no_key_and_no_shard_in_clear(
    disk: Callable[..., EncryptedTier], folder: Path
) -> None:
    tier = disk()
    shard = np.frombuffer(b"a shard in clear" * 1024, np.uint8)
    assert tier.store_for("team-a", [b"the key of a record"], [[shard]]) == [True]
    assert isinstance(tier, DividedTier)
    tier.close()
    everything = b"".join(path.read_bytes() for path in folder.iterdir())
    assert b"kvassrec\2\0" in everything
    for clear in (b"the key of a record", b"a shard in clear", b"team-a"):
        assert clear not in everything


def records(folder: Path) -> list[int]:
    """Where the headers are in the segment."""
    raw = (folder / "00000001.seg").read_bytes()
    return [at for at in range(PAGE, len(raw), PAGE) if raw[at : at + 8] == b"kvassrec"]


def test_changed_cut_and_swapped_records_are_misses(
    disk: Callable[..., EncryptedTier], folder: Path
) -> None:
    """Also where whoever changed them made the header's checksum right again."""
    tier = disk()
    assert all(fill(tier, KEYS))
    tier.close()
    path = folder / "00000001.seg"
    raw = bytearray(path.read_bytes())
    places = records(folder)
    headers = [codec.decode_header(bytes(raw[at : at + PAGE])) for at in places]
    assert len(places) == len(KEYS)
    raw[places[0] + PAGE + 7] ^= 1  # a shard
    for number, at in ((1, -1), (2, 0), (3, 10), (4, 30)):  # the tag, key id, salt, nonce
        header = headers[number]
        assert header is not None
        seal = bytearray(header.seal)
        seal[at] ^= 1
        changed = codec.Header(
            header.key, header.lengths, header.sequence, header.payload_checksum, bytes(seal)
        )
        new = codec.encode_header(changed)
        raw[places[number] : places[number] + len(new)] = new
    one, other = headers[5], headers[6]
    assert one is not None
    assert other is not None
    moved = codec.encode_header(
        codec.Header(one.key, other.lengths, one.sequence, other.payload_checksum, other.seal)
    )
    slot = places[1] - places[0]
    raw[places[5] : places[5] + slot] = raw[places[6] : places[6] + slot]
    raw[places[5] : places[5] + len(moved)] = moved
    plain = headers[7]
    assert plain is not None
    shards = data_of(KEYS[7], (5000, 4096))
    body = codec.encode_header(codec.header_of(plain.key, shards, plain.sequence))
    raw[places[7] : places[7] + len(body)] = body  # not encrypted at all
    path.write_bytes(raw)
    tier = disk()
    which = hits(tier, KEYS)
    assert which.count(False) == 7
    assert tier.report()["not_decrypted"] == 7
    assert all(fill(tier, KEYS))
    assert all(hits(tier, KEYS))
    tier.close()
    os.truncate(path, records(folder)[4])
    tier = disk()
    assert hits(tier, KEYS).count(True) == 4


def test_without_the_tag_wrong_bytes_would_be_served(
    disk: Callable[..., EncryptedTier], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above."""
    tier = disk()
    assert all(fill(tier, KEYS))
    path = folder / "00000001.seg"
    with path.open("r+b") as file:
        file.seek(records(folder)[3] + PAGE)
        file.write(b"other bytes")
    monkeypatch.setattr(encryption.Decryption, "right", lambda self: True)
    with pytest.raises(AssertionError, match="wrong bytes"):
        hits(tier, KEYS)


def test_a_wrong_key_is_a_miss_and_said(
    disk: Callable[..., EncryptedTier], key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = disk()
    assert all(fill(tier, KEYS))
    assert tier.report()["other_keys"] == 0
    tier.close()
    write_keys(key_file, OTHER)
    for _ in range(2):  # each process says it, without a store
        caplog.clear()
        tier = disk()
        for _ in range(2):
            tier.check_store()
            assert tier.report()["other_keys"] == 1
        assert not any(tier.probe(KEYS))
        assert not any(hits(tier, KEYS))
        said = "the first key of key_file is new here; keys that have stored records here and are"
        assert caplog.text.count(f"{said} not in key_file: 1;") == 1
        tier.close()
    tier = disk()
    assert all(fill(tier, KEYS[:3]))
    assert tier.report()["other_keys"] == 1
    assert OTHER not in caplog.text
    tier.close()
    write_keys(key_file, OLD)
    caplog.clear()
    tier = disk()
    tier.check_store()
    assert "is new here" not in caplog.text
    assert "are not in key_file: 1;" in caplog.text
    assert all(hits(tier, KEYS))
    tier.clear()
    assert tier.report()["other_keys"] == 0


def test_a_rotation_is_said_once_and_is_no_trouble(
    disk: Callable[..., EncryptedTier], key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = disk()
    assert works(tier)
    tier.check_store()
    assert "key_file" not in caplog.text
    write_keys(key_file, NEW, OLD)
    for _ in range(2):
        tier.check_store()
        assert all(tier.probe(KEYS))
        assert all(fill(tier, KEYS[:1]))
    assert caplog.text.count("is new here") == 1
    assert "are not in key_file: 0;" in caplog.text
    assert tier.report()["other_keys"] == 0


def test_a_store_that_is_down_at_the_start_is_asked_again(
    disk: Callable[..., EncryptedTier], key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = disk()
    assert works(tier)
    tier.close()
    write_keys(key_file, OTHER)
    tier = disk()
    for error in (TierDown("no answer"), ItemRefused("not this one")):
        with monkeypatch.context() as down:
            down.setattr(DiskTier, "_get_note", Mock(side_effect=error))
            with nullcontext() if isinstance(error, ItemRefused) else pytest.raises(TierDown):
                tier.check_store()
        assert tier.report()["other_keys"] == 0
    tier.check_store()
    assert tier.report()["other_keys"] == 1


def test_a_key_is_rotated_under_load(disk: Callable[..., EncryptedTier], key_file: Path) -> None:
    tier = disk()
    assert all(fill(tier, KEYS))
    failed: list[AssertionError] = []
    stop = threading.Event()
    rounds = [0, 0]

    def load(me: int) -> None:
        try:
            while not stop.is_set():
                assert all(hits(tier, KEYS)), "both keys decrypt"
                rounds[me] += 1
        except AssertionError as error:
            failed.append(error)

    threads = [threading.Thread(target=load, args=(me,)) for me in range(2)]
    for thread in threads:
        thread.start()
    write_keys(key_file, NEW, OLD)
    assert all(fill(tier, [b"new"]))
    while min(rounds) < 3 and not failed:
        stop.wait(0.01)
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not failed, failed
    assert tier.report()["not_decrypted"] == 0
    write_keys(key_file, NEW)
    assert not any(hits(tier, KEYS))
    assert hits(tier, [b"new"]) == [True]
    assert all(fill(tier, KEYS))
    assert all(hits(tier, KEYS))
    write_keys(key_file, OLD, NEW)
    tier.delete(KEYS)
    assert not any(tier.probe(KEYS)), "deleted under the names of all keys"


def test_each_tenant_has_its_data_keys_for_so_many_records(
    key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encryption, "MOST_RECORDS", 2)
    cipher = encryption.Encryption(KeyFile(str(key_file)))

    def seal(tenant: str) -> bytes:
        return cipher.seal(tenant, b"name", (100,)).end()

    def salt(tenant: str) -> bytes:
        return seal(tenant)[8:24]

    one, other = [salt("a") for _ in range(5)], salt("b")
    assert one[0] == one[1] != one[2] == one[3] != one[4]
    assert other not in one
    seals = {seal("c") for _ in range(50)}
    assert len({seal[24:36] for seal in seals}) == 50  # nonces


@pytest.mark.parametrize(
    ("content", "mode", "says"),
    [
        (OLD, 0o604, "chmod 600"),
        ("", 0o600, "has no key"),
        (f"{OLD}\n{OLD}", 0o600, "same key twice"),
        (f"{OLD}\n{NEW}\n{OTHER}", 0o600, "has 3 keys"),
        (f"{OLD}\n{OTHER[:-1]}", 0o600, "line 2: a key is 64 hexadecimal digits"),
        ("zz" * 32, 0o600, "line 1"),
        ("x" * 5000, 0o600, "longer than"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_clear_line(
    folder: Path, tmp_path: Path, content: str, mode: int, says: str
) -> None:
    path = tmp_path / "bad"
    path.write_text(content)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=says) as caught:
        open_tier(f"disk:{folder}?capacity=16MiB&key_file={path}")
    said = str(caught.value)
    assert str(path) in said
    assert "\n" not in said
    assert not any(key[:20] in said for key in (OLD, OTHER))
    assert list(folder.iterdir()) == []


def test_other_mistakes_are_one_clear_line(folder: Path, tmp_path: Path) -> None:
    for value, says in (
        ("", "key_file"),
        (tmp_path, "directory"),
        (tmp_path / "no", "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=says):
            open_tier(f"disk:{folder}?capacity=16MiB&key_file={value}")


def test_a_file_that_became_bad_changes_nothing(
    disk: Callable[..., EncryptedTier], key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = disk()
    assert works(tier)
    key_file.write_text("half a key")
    assert works(tier)
    assert works(tier)
    assert caplog.text.count("the old keys stay in use") == 1
    key_file.unlink()
    assert works(tier)


def test_note_is_kept_in_bounds(
    disk: Callable[..., EncryptedTier], key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encrypted, "_MOST_IDS", 2)
    tier = disk()
    for key in (OLD, NEW, OTHER):
        write_keys(key_file, key)
        assert works(tier)
    assert len(tier.note(encrypted.KEYS_NOTE) or b"") == 2 * encryption.ID_BYTES
