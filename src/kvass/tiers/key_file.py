"""The file with the keys of an encrypted tier: one key, or two during a rotation.

Laws of this file: a file that every user of the machine can read is refused. No error and no log
line has a part of a key. A changed file is used from the next call on; if it cannot be used, the
keys stay as they were.

A key is a line of 64 hexadecimal digits. The first one encrypts, both decrypt. Empty lines, and
lines that begin with ``#``, are ignored.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
from typing import Final

from kvass.errors import ConfigError

KEY_BYTES: Final = 32
_MOST_KEYS: Final = 2
_LONGEST_FILE: Final = 4096
_log = logging.getLogger("kvass.tiers")


class KeyFile:
    """The keys in the file ``path``. Thread-safe. Raises ``ConfigError`` for a file that cannot be
    used."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._version = self._version_now()
        self._keys = self._read()

    def keys(self) -> tuple[bytes, ...]:
        with self._lock:
            if (version := self._version_now()) != self._version:
                self._version = version
                try:
                    self._keys = self._read()
                    _log.info("key_file %s: read again, keys: %d", self._path, len(self._keys))
                except ConfigError as error:
                    _log.warning("%s; the old keys stay in use", error)
            return self._keys

    def _version_now(self) -> tuple[int, ...]:
        """Return a value that differs after each change of the file. Empty if there is no file."""
        try:
            now = os.stat(self._path)
        except (OSError, ValueError):
            return ()
        return now.st_mtime_ns, now.st_ino, now.st_size, now.st_mode

    def _read(self) -> tuple[bytes, ...]:
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            with os.fdopen(fd, "rb") as file:
                mode = os.fstat(fd).st_mode
                raw = file.read(_LONGEST_FILE + 1) if stat.S_ISREG(mode) else b""
        except OSError as error:
            raise self._refused(f"cannot be read: {error.strerror}") from error
        if not stat.S_ISREG(mode):
            raise self._refused("is no regular file")
        if mode & stat.S_IRWXO:
            path = self._path
            raise self._refused(
                "others can read it or write to it: "
                f"chmod 600 {path} (640, if a group is to read it)"
            )
        if len(raw) > _LONGEST_FILE:
            raise self._refused(f"is longer than {_LONGEST_FILE} bytes")
        keys = []
        for number, line in enumerate(raw.splitlines(), 1):
            if (text := line.strip()) and not text.startswith(b"#"):
                keys.append(self._key(number, text))
        if not keys:
            raise self._refused("has no key; write one with `openssl rand -hex 32`")
        if len(keys) > _MOST_KEYS:
            raise self._refused(
                f"has {len(keys)} keys; the first one encrypts, and one older key may follow"
            )
        if len(set(keys)) < len(keys):
            raise self._refused("has the same key twice")
        return tuple(keys)

    def _key(self, number: int, text: bytes) -> bytes:
        try:
            key = bytes.fromhex(text.decode("ascii"))
        except ValueError:
            key = b""
        if len(text) != 2 * KEY_BYTES or len(key) != KEY_BYTES:
            digits = f"a key is {2 * KEY_BYTES} hexadecimal digits (`openssl rand -hex 32`)"
            raise self._refused(f"line {number}: {digits}") from None
        return key

    def _refused(self, why: str) -> ConfigError:
        return ConfigError(f"key_file {self._path}: {why}")
