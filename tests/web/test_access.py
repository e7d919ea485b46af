"""Who may ask what over HTTP."""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from kvass.config import Config
from kvass.errors import ConfigError
from kvass.web.access import Denied, HttpAccess, Need, Token, listen, split_address

TOKEN = "0123456789abcdef"
READ = "fedcba9876543210"
HERE = {"Host": "127.0.0.1:9273"}


def config(folder: Path, http: str = "127.0.0.1:9273", **more: Any) -> Config:
    """With the files that the options name."""
    for name, text in (("token", TOKEN), ("read", READ), ("short", "secret")):
        (folder / name).write_text(text + "\n")
        (folder / name).chmod(0o600)
    files: dict[str, Any] = {
        k: str(folder / v) if k.endswith("_file") else v for k, v in more.items()
    }
    return Config(http=http, **files)


def status(access: HttpAccess, need: Need, token: str = "", **headers: str) -> int:
    """200, or what refused it."""
    sent = HERE | headers | ({"Authorization": f"Bearer {token}"} if token else {})
    try:
        access.check(need, sent)
    except Denied as denied:
        return denied.status
    return HTTPStatus.OK


def test_on_loopback_reading_is_open_and_changes_are_off(tmp_path: Path) -> None:
    access = HttpAccess.of(config(tmp_path))
    assert status(access, "nothing") == status(access, "read") == 200
    assert status(access, "write") == status(access, "write", TOKEN) == 403


def test_each_token_opens_what_it_is_for(tmp_path: Path) -> None:
    options = {"http_token_file": "token", "http_read_token_file": "read"}
    access = HttpAccess.of(config(tmp_path, **options))
    for token, expected in (("", (401, 401)), (READ, (200, 401)), (TOKEN, (200, 200))):
        assert (status(access, "read", token), status(access, "write", token)) == expected
    for wrong in (TOKEN[:-1], TOKEN + "0", "é" * 16):
        assert status(access, "write", wrong) == 401
    assert status(access, "nothing") == 200


def test_a_token_file_that_changed_is_read_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that cannot be used changes nothing, and one line says why."""
    access = HttpAccess.of(config(tmp_path, http_token_file="token"))
    file, new, newer = tmp_path / "token", "a token that is new", "one that is newer"
    file.write_text(new)
    assert [status(access, "write", token) for token in (TOKEN, new)] == [401, 200]
    for break_it in (lambda: file.write_text("short"), file.unlink):
        caplog.clear()
        break_it()
        assert [status(access, "write", token) for token in ("short", new, new)] == [401, 200, 200]
        (said,) = [r.message for r in caplog.records]
        assert "the old token stays valid" in said
        assert new not in said
    (tmp_path / "next").write_text(newer)
    (tmp_path / "next").chmod(0o600)
    (tmp_path / "next").rename(file)
    assert [status(access, "write", token) for token in (new, newer)] == [401, 200]


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o601])
def test_a_token_file_that_others_can_read_is_refused_and_the_token_before_stays(
    mode: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    access = HttpAccess.of(config(tmp_path, http_token_file="token"))
    file, new = tmp_path / "token", "a token that is new"
    file.chmod(0o640)
    assert status(access, "write", TOKEN) == 200, "a group may read it"
    caplog.clear()
    file.write_text(new)
    file.chmod(mode)
    with pytest.raises(ConfigError, match=f"others can read it or write to it: chmod 600 {file}"):
        Token(str(file))
    assert [status(access, "write", token) for token in (TOKEN, new)] == [200, 401]
    (said,) = [r.message for r in caplog.records]
    assert "the old token stays valid" in said
    file.chmod(0o600)
    assert [status(access, "write", token) for token in (TOKEN, new)] == [401, 200]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "give --http-token-file"),
        ({"http_token_file": "short"}, "16 or more"),
        ({"http_token_file": "missing"}, "cannot read"),
    ],
)
def test_beyond_loopback_a_token_file_is_needed(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        HttpAccess.of(config(tmp_path, "0.0.0.0:9273", **options))


def test_beyond_loopback_reading_needs_a_token(tmp_path: Path) -> None:
    access = HttpAccess.of(config(tmp_path, "0.0.0.0:9273", http_token_file="token"))
    assert [status(access, "read", token) for token in ("", TOKEN)] == [401, 200]
    assert status(access, "nothing") == 200


@pytest.mark.parametrize(("address", "warned"), [("127.0.0.1:0", False), ("0.0.0.0:0", True)])
def test_an_address_that_others_can_reach_is_warned_of_once(
    address: str, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    listen(config(tmp_path, address, http_token_file="token")).close()
    assert len(caplog.messages) == warned
    assert all("put a reverse proxy with TLS in front" in line for line in caplog.messages)


@pytest.mark.parametrize("host", ["localhost:9273", "127.0.0.1", "[::1]:9273", "cache.example:80"])
def test_known_hosts(tmp_path: Path, host: str) -> None:
    access = HttpAccess.of(config(tmp_path, http_host=["cache.example"]))
    assert status(access, "read", Host=host) == 200
    assert status(access, "read", Host=host, Origin=f"http://{host}") == 200
    assert status(access, "read", Host=host, Origin=f"https://{host}") == 200, "a proxy's"
    for other in ("http://evil.example", "https://evil.example", f"ftp://{host}", "null", ""):
        assert status(access, "read", Host=host, Origin=other) == 403


@pytest.mark.parametrize("host", ["evil.example:9273", "", "localhost.evil.example", "1.2.3.4.x"])
def test_other_names_are_refused(tmp_path: Path, host: str) -> None:
    """A page whose name resolves to this machine (DNS rebinding) sends its own name."""
    access = HttpAccess.of(config(tmp_path))
    assert {status(access, need, Host=host) for need in ("nothing", "read", "write")} == {403}


@pytest.mark.parametrize(
    "text", ["9273", "127.0.0.1", "host:1", ":1", "1.2.3.4:x", "1.2.3.4:65536"]
)
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="ADDRESS:PORT"):
        split_address(text)
