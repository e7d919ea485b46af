"""A tier whose records are encrypted: it gives a ``RecordTier`` names instead of keys.

Law of this file: what is passed on has no key of a record; a record that cannot be decrypted is a
miss.

Records are stored under the name that the first key of the file gives them, and sought under those
of all its keys. Notes are not encrypted: the epochs of namespaces, and which keys have stored
records here. ``kvass clear --tier`` forgets the latter. They are read at the first check of the
store, which a tier's process makes at its start, and at the next one after the first key changed.
So a wrong file is seen before anything is stored.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from kvass.errors import ItemRefused, TierDown
from kvass.tiers.base import Shards, check_batch
from kvass.tiers.encryption import ID_BYTES, Encryption
from kvass.tiers.key_file import KeyFile
from kvass.tiers.record_tier import RecordTier
from kvass.types import DEFAULT_TENANT

KEYS_NOTE: Final = "encryption.keys"
"""The ids of the keys that have stored records, the newest last."""
_MOST_IDS: Final = 64
_log = logging.getLogger("kvass.tiers")


class EncryptedTier:
    """``Tier`` and ``DividedTier``: encrypts what ``tier`` keeps."""

    def __init__(self, tier: RecordTier, encryption: Encryption) -> None:
        self.name = tier.name
        self._tier, self._encryption = tier, encryption
        tier.sealing = encryption
        self._noting = threading.Lock()
        self._looked = self._noted = b""
        """The ids of the first keys for which the note was last read, and last had that key."""
        self._used: list[bytes] = []

    def probe(self, keys: Sequence[bytes]) -> list[bool]:
        check_batch(keys)
        return self._with_each_key(keys, lambda names, _: self._tier.probe(names))

    def load(self, keys: Sequence[bytes], into: Sequence[Shards]) -> list[bool]:
        check_batch(keys, into)
        return self._with_each_key(
            keys, lambda names, which: self._tier.load(names, [into[i] for i in which])
        )

    def store(self, keys: Sequence[bytes], data: Sequence[Shards]) -> list[bool]:
        return self.store_for(DEFAULT_TENANT, keys, data)

    def store_for(self, tenant: str, keys: Sequence[bytes], data: Sequence[Shards]) -> list[bool]:
        check_batch(keys, data)
        first = self._encryption.ring()[0]
        self._note_key(first.id)
        return self._tier.store_for(tenant, [first.name(key) for key in keys], data)

    def delete(self, keys: Sequence[bytes]) -> None:
        check_batch(keys)
        for master in self._encryption.ring():
            self._tier.delete([master.name(key) for key in keys])

    def clear(self) -> None:
        self._tier.clear()
        with self._noting:
            self._noted, self._used = b"", []
            self._tier.set_note(KEYS_NOTE, b"")

    def note(self, name: str) -> bytes | None:
        return self._tier.note(name)

    def set_note(self, name: str, value: bytes) -> None:
        self._tier.set_note(name, value)

    def check_store(self, whole: bool = True) -> bool:
        """See ``ProvingTier``."""
        written = self._tier.check_store(whole)
        with suppress(ItemRefused):  # the store is well, and this is asked again at the next check
            self._look_for_keys()
        return written

    def close(self) -> None:
        self._tier.close()

    def report(self) -> dict[str, Any]:
        """Return the tier's report, with ``not_decrypted``: records that were loaded but could not
        be decrypted, and ``other_keys``: keys that have stored records here and are not in the
        file. Their records are not found."""
        return self._tier.report() | {
            "not_decrypted": self._encryption.not_decrypted,
            "other_keys": self._others(),
        }

    def _with_each_key(
        self,
        keys: Sequence[bytes],
        ask: Callable[[list[bytes], Sequence[int]], list[bool]],
    ) -> list[bool]:
        """Call ``ask(names, indices)`` with the names that the first key gives, then with those
        that the next one gives to what was not held. Returns for each key whether it was held."""
        held = [False] * len(keys)
        left: Sequence[int] = range(len(keys))
        for master in self._encryption.ring():
            try:
                found = ask([master.name(keys[i]) for i in left], left)
            except TierDown:
                if not any(held):
                    raise
                break
            for i, answer in zip(left, found, strict=True):
                held[i] = answer
            left = [i for i in left if not held[i]]
            if not left:
                break
        return held

    def _look_for_keys(self) -> None:
        """Read the note of keys, and log what of them the file lacks. Raises ``TierDown``."""
        first = self._encryption.ring()[0].id
        with self._noting:
            if self._looked == first:
                return
            self._read_note()
            self._looked = first
            others, new = self._others(), self._used and first not in self._used
        if new or others:
            what = "the first key of key_file is new here; " if new else ""
            line = "%s: %skeys that have stored records here and are not in key_file: %d"
            _log.warning(f"{line}; their records are misses", self._tier.name, what, others)

    def _others(self) -> int:
        ids = [master.id for master in self._encryption.ring()]
        return sum(one not in ids for one in self._used)

    def _note_key(self, first: bytes) -> None:
        """Add the key that encrypts to the note of keys, before it stores its first record. Raises
        ``TierDown``."""
        with self._noting:
            if self._noted == first:
                return
            self._read_note()
            if first not in self._used:
                self._used = [*self._used, first][-_MOST_IDS:]
                self._tier.set_note(KEYS_NOTE, b"".join(self._used))
            self._noted = first

    def _read_note(self) -> None:
        raw = self._tier.note(KEYS_NOTE) or b""
        self._used = [raw[i : i + ID_BYTES] for i in range(0, len(raw), ID_BYTES)]


def open_encrypted(open_: Callable[[], RecordTier], key_file: str) -> EncryptedTier:
    """Open a tier, and encrypt what it keeps with the keys of a file. Raises ``ConfigError``, and
    what ``open_`` raises."""
    encryption = Encryption(KeyFile(key_file))
    return EncryptedTier(open_(), encryption)
