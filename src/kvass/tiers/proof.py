"""Proof that what answers is the store of a tier: a note that is written and read back.

Law of this file: an answer counts for what it says, and not for its status code. The note has a
checksum. A page that a proxy gives instead has none.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Final, Literal, TypeAlias

import xxhash

from kvass.errors import ItemRefused, ItemUnreadable, TierDown
from kvass.tiers.base import MAX_NOTE_BYTES

NAME: Final = "check"
"""The name of the note. Daemons that share a store share it."""
_BEGIN: Final = b"kvass check "
_RANDOM_BYTES: Final = 16
_AGAIN_S: Final = (0.02, 0.05, 0.2)
"""Seconds before an absent or old note is read again: another daemon may be replacing it, which
Mooncake removes first, or a replica answers."""
_WORDS: Final = 60
"""Characters of a wrong answer that are shown."""

Depth: TypeAlias = Literal["read", "try", "write"]
"""``read``: the note is read; it is written if it is not right. ``try``: it is also written, if
that is possible. ``write``: it must be. A store that is full or read-only serves loads."""


class Proof:
    """Proves a store with its calls for notes. Thread-safe.

    ``get`` returns a note, or None only if the store itself said that there is none. Both raise
    ``ItemRefused`` if the store refused the request, and ``TierDown`` if it did not answer.
    """

    def __init__(
        self,
        name: str,
        get: Callable[[str], bytes | None],
        put: Callable[[str, bytes], None],
    ) -> None:
        self._name, self._get, self._put = name, get, put
        self._lock = threading.Lock()
        self._last: dict[Depth, tuple[float, str, bool]] = {}
        """When the last proof of each depth began, why it failed, or an empty text, and whether it
        has written."""

    def prove(self, depth: Depth, since: float) -> bool:
        """Raise ``TierDown`` unless the store is proven. Returns whether it was written to. A proof
        that began at ``since`` (monotonic) or later counts, also one that failed. So calls that
        wait for one another make one request."""
        with self._lock:
            begun, failure, written = self._last.get(depth, (-1.0, "", False))
            if begun < since:
                begun, failure, written = time.monotonic(), "", False
                try:
                    written = self._try(depth)
                except TierDown as error:
                    failure = str(error)
                self._last[depth] = begun, failure, written
        if failure:
            raise TierDown(failure)
        return written

    def _try(self, depth: Depth) -> bool:
        try:
            before = self._get(NAME)
        except ItemUnreadable:
            before = b""
        if depth == "read" and _is_right(before):
            return False
        try:
            self._put(NAME, _made())
        except TierDown as error:
            absent = before is None and isinstance(error, ItemRefused)
            if depth == "write" or not (absent or _is_right(before)):
                raise
            return False  # reading is well: its answer was the store's own
        after = self._get(NAME)
        for pause_s in _AGAIN_S:
            if after is not None and not (after == before and _is_right(after)):
                break
            time.sleep(pause_s)
            after = self._get(NAME)
        if after == before or not _is_right(after):
            said = "nothing" if after is None else repr(first_words(after))
            text = f"{self._name}: what was written is not read back, but {said}: is it the store?"
            raise TierDown(text)
        return True


def first_words(answer: bytes) -> str:
    """Return the beginning of an answer, to show it."""
    text = answer[: 4 * _WORDS].decode("ascii", "replace").replace("\ufffd", "?")
    return " ".join(text.split())[:_WORDS]


def _made() -> bytes:
    """Return a new value: none is written twice, so an old one is no proof of a write."""
    value = _BEGIN + os.urandom(_RANDOM_BYTES).hex().encode()
    return value + b" " + xxhash.xxh3_64_hexdigest(value).encode()


def _is_right(value: bytes | None) -> bool:
    if value is None or len(value) > MAX_NOTE_BYTES:
        return False
    begin, _, check = value.rpartition(b" ")
    return begin.startswith(_BEGIN) and check == xxhash.xxh3_64_hexdigest(begin).encode()
