"""Access control of the HTTP server: tokens, and checks of ``Host`` and ``Origin``.

Laws of this file:

- On an address that other machines can reach, only the health checks need no token.
- A request that changes the cache always needs a token.
- A token file that every user of this machine can read is refused.
- A web page of another site is refused: ``Host`` must be an address or a configured name.
  ``Origin``, if a request has one, must name the same host, over HTTP or over a proxy's HTTPS.

There is no TLS here: a reverse proxy adds it.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import os
import socket
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Literal

from kvass.config import Config
from kvass.errors import ConfigError

Need = Literal["nothing", "read", "write"]

_SHORTEST_TOKEN = 16
_LONGEST_FILE = 64 << 10
_log = logging.getLogger("kvass.web")


@dataclass(frozen=True)
class Denied(Exception):
    """A refused request: the HTTP status, and one line that says what to do."""

    status: HTTPStatus
    line: str


class Token:
    """The token in the file ``path``; no token if ``path`` is empty. Thread-safe.

    A changed file is read again at the next check. If the new file cannot be used, the old token
    stays valid.
    """

    def __init__(self, path: str) -> None:
        """Raises ``ConfigError`` for a file that cannot be used."""
        self._path = path
        self._version = self._version_now()
        self._text = self._read() if path else b""

    def __bool__(self) -> bool:
        return bool(self._path)

    def matches(self, header: bytes) -> bool:
        """Whether the ``Authorization`` header has this token. Compares in constant time."""
        if not self:
            return False
        if (version := self._version_now()) != self._version:
            self._version = version
            try:
                self._text = self._read()
                _log.info("token file %s: read again", self._path)
            except ConfigError as error:
                _log.warning("%s; the old token stays valid", error)
        return hmac.compare_digest(header, b"Bearer " + self._text)

    def _version_now(self) -> tuple[int, ...]:
        """A value that differs after each change of the file. Empty if there is no file."""
        try:
            now = os.stat(self._path)
        except OSError:
            return ()
        return now.st_mtime_ns, now.st_ino, now.st_size, now.st_mode

    def _read(self) -> bytes:
        try:
            with open(self._path, "rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                token = file.read(_LONGEST_FILE).strip()
        except OSError as error:
            line = f"cannot read token file {self._path}: {error.strerror}"
            raise ConfigError(line) from error
        if mode & stat.S_IRWXO:
            line = f"token file {self._path}: others can read it or write to it"
            raise ConfigError(f"{line}: chmod 600 {self._path} (640, if a group is to read it)")
        if len(token) < _SHORTEST_TOKEN or not token.isascii():
            least = f"write {_SHORTEST_TOKEN} or more ASCII characters"
            raise ConfigError(f"token file {self._path}: {least}")
        return token


@dataclass(frozen=True)
class HttpAccess:
    """The rules for one address. ``write`` is the token that allows everything, ``read`` the token
    that allows reading only."""

    host: str
    port: int
    names: frozenset[str]
    write: Token
    read: Token

    @classmethod
    def of(cls, config: Config) -> HttpAccess:
        """Raises ``ConfigError`` for an address or a file that cannot be used."""
        host, port = split_address(config.http)
        access = cls(
            host=host,
            port=port,
            names=frozenset(config.http_host),
            write=Token(config.http_token_file),
            read=Token(config.http_read_token_file),
        )
        if not access.local and not (access.write or access.read):
            raise ConfigError(
                f"http {config.http}: others can reach it: give --http-token-file or "
                "--http-read-token-file, or listen on 127.0.0.1"
            )
        return access

    @property
    def local(self) -> bool:
        """Whether only this machine can reach it."""
        return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback

    def check(self, need: Need, headers: Mapping[str, str]) -> None:
        """Raises ``Denied``."""
        self._check_site(headers)
        if need == "nothing" or (need == "read" and self.local and not self.read):
            return
        header = headers.get("Authorization", "").encode("utf-8", "replace")
        if self.write.matches(header) or (need == "read" and self.read.matches(header)):
            return
        if need == "write" and not self.write:
            line = "changes are off: start with --http-token-file"
            raise Denied(HTTPStatus.FORBIDDEN, line)
        line = "send the token: 'Authorization: Bearer TOKEN'"
        raise Denied(HTTPStatus.UNAUTHORIZED, line)

    def _check_site(self, headers: Mapping[str, str]) -> None:
        host = headers.get("Host", "")
        if not self._known(host):
            line = f"unknown host {host[:80]!r}: use the address, or start with --http-host NAME"
            raise Denied(HTTPStatus.FORBIDDEN, line)
        origin = headers.get("Origin")
        if origin not in (None, f"http://{host}", f"https://{host}"):
            raise Denied(HTTPStatus.FORBIDDEN, "requests of other sites' pages are refused")

    def _known(self, host: str) -> bool:
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        if name == "localhost" or name in self.names:
            return True
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True


def split_address(text: str) -> tuple[str, int]:
    """``127.0.0.1:9273``, ``[::1]:9273`` or ``localhost:9273``; raises ``ConfigError``."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        if host != "localhost":
            ipaddress.ip_address(host)
        if not colon or not 0 <= int(port) < 1 << 16:
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"http {text!r}: write ADDRESS:PORT, like 127.0.0.1:9273 or 0.0.0.0:9273"
        ) from None
    return host, int(port)


def listen(config: Config) -> socket.socket:
    """A listening socket at the address ``config.http``. Raises ``ConfigError``."""
    access = HttpAccess.of(config)
    if not access.local:
        _log.warning(
            "http %s: tokens travel in plain text: put a reverse proxy with TLS in front, and "
            "listen on 127.0.0.1",
            config.http,
        )
    family = socket.AF_INET6 if ":" in access.host else socket.AF_INET
    try:
        return socket.create_server((access.host, access.port), family=family, backlog=64)
    except OSError as error:
        raise ConfigError(f"http {config.http}: {error.strerror}") from error
