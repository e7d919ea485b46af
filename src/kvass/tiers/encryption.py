"""AES-256-GCM of records: names, keys and tags.

Laws of this file: no key encrypts twice with one nonce, and no decrypted byte counts before the tag
over all of the record was found right.

- **Name.** A store sees HMAC-SHA256 of a record's key, and not the key.
- **Data key.** Each tenant's records have a data key of their own: HKDF-SHA256 of a key of the file
  and of 16 random bytes, the *salt*. Each process of a tier takes new salts. So a loader needs no
  tenant's name, and none is in a seal.
- **Nonce.** Each record has a random nonce of 96 bits. A data key encrypts at most ``MOST_RECORDS``
  (2^32) records, as NIST SP 800-38D says for random nonces; then the tenant gets a new salt.
- **Tag.** It covers the encrypted shards, the record's name, their lengths, and the seal. So bytes
  that were changed, cut or moved to another name are not right.

The seal of a record: 8 bytes that identify the key of the file, salt (16), nonce (12), tag (16).
"""

from __future__ import annotations

import hmac
import os
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import GCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kvass.tiers.codec import SEAL_BYTES, TAG_BYTES, Header, authenticated
from kvass.tiers.key_file import KEY_BYTES, KeyFile
from kvass.tiers.pacing import CIPHER_BYTES, yield_cpu

MOST_RECORDS: Final = 1 << 32
ID_BYTES: Final = 8
_SALT_BYTES: Final = 16
_NONCE_BYTES: Final = 12
_MOST_TENANTS: Final = 1024
"""Tenants whose data keys are remembered. Above it all get new ones."""
_MOST_SALTS: Final = 4096
"""Data keys that are remembered for loads."""
assert ID_BYTES + _SALT_BYTES + _NONCE_BYTES + TAG_BYTES == SEAL_BYTES


class MasterKey:
    """A key of the key file, and what is derived from it. ``id`` tells it from others, and says
    nothing about it."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self.id = self._derived(b"kvass key id", None, ID_BYTES)
        self._name_key = self._derived(b"kvass record name", None)
        self.data_key = lru_cache(_MOST_SALTS)(self._data_key)

    def name(self, key: bytes) -> bytes:
        """Return the name under which a store has the record ``key``."""
        return hmac.digest(self._name_key, key, "sha256")

    def _data_key(self, salt: bytes) -> bytes:
        return self._derived(b"kvass record", salt)

    def _derived(self, what: bytes, salt: bytes | None, length: int = KEY_BYTES) -> bytes:
        return HKDF(SHA256(), length, salt, what).derive(self._key)


class _Salt:
    """A salt, and how many records it may still be used for."""

    def __init__(self) -> None:
        self.value = os.urandom(_SALT_BYTES)
        self.left = MOST_RECORDS


class Encryption:
    """Encrypts and decrypts records with the keys of a file. Thread-safe. It is the
    ``record_tier.Sealing`` of a tier."""

    def __init__(self, file: KeyFile) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._keys: tuple[bytes, ...] = ()
        self._ring: tuple[MasterKey, ...] = ()
        self._salts: dict[tuple[bytes, str], _Salt] = {}
        self.not_decrypted = 0
        """Records that were loaded but could not be decrypted."""

    def ring(self) -> tuple[MasterKey, ...]:
        """Return the keys of the file. The first one encrypts."""
        keys = self._file.keys()
        with self._lock:
            if keys != self._keys:
                known = dict(zip(self._keys, self._ring, strict=True))
                self._keys, self._ring = keys, tuple(known.get(k) or MasterKey(k) for k in keys)
            return self._ring

    def seal(self, tenant: str, key: bytes, lengths: tuple[int, ...]) -> Sealer:
        """See ``codec.Seal``. ``key`` is the record's name."""
        master = self.ring()[0]
        salt = self._salt_for(master, tenant)
        nonce = os.urandom(_NONCE_BYTES)
        encryptor = Cipher(AES256(master.data_key(salt)), GCM(nonce)).encryptor()
        seal = master.id + salt + nonce
        encryptor.authenticate_additional_data(authenticated(key, lengths, seal))
        return Sealer(encryptor, seal)

    def open(self, header: Header) -> Decryption | None:
        """See ``codec.Open``. None if the record is not encrypted, or its key is not in the
        file."""
        seal, tag = header.seal[:-TAG_BYTES], header.seal[-TAG_BYTES:]
        master = next((one for one in self.ring() if one.id == seal[:ID_BYTES]), None)
        if master is None:
            self._failed()
            return None
        salt, nonce = seal[ID_BYTES:-_NONCE_BYTES], seal[-_NONCE_BYTES:]
        decryptor = Cipher(AES256(master.data_key(salt)), GCM(nonce)).decryptor()
        decryptor.authenticate_additional_data(authenticated(header.key, header.lengths, seal))
        return Decryption(decryptor, tag, self._failed)

    def _salt_for(self, master: MasterKey, tenant: str) -> bytes:
        """Return the salt for the next record, and count that record."""
        with self._lock:
            salt = self._salts.get((master.id, tenant))
            if salt is None or not salt.left:
                if len(self._salts) >= _MOST_TENANTS:
                    self._salts.clear()
                salt = self._salts[master.id, tenant] = _Salt()
            salt.left -= 1
            return salt.value

    def _failed(self) -> None:
        with self._lock:
            self.not_decrypted += 1


class Sealer:
    """See ``codec.Closing``."""

    def __init__(self, encryptor: Any, seal: bytes) -> None:
        self._encryptor, self._seal = encryptor, seal

    def move(self, source: memoryview, target: memoryview) -> None:
        _paced(self._encryptor.update_into, source, target)

    def end(self) -> bytes:
        self._encryptor.finalize()
        tag: bytes = self._encryptor.tag
        return self._seal + tag


class Decryption:
    """See ``codec.Opening``. Calls ``failed`` if the record is not right."""

    def __init__(self, decryptor: Any, tag: bytes, failed: Callable[[], None]) -> None:
        self._decryptor, self._tag, self._failed = decryptor, tag, failed

    def move(self, source: memoryview, target: memoryview) -> None:
        _paced(self._decryptor.update_into, source, target)

    def right(self) -> bool:
        try:
            self._decryptor.finalize_with_tag(self._tag)
        except InvalidTag:
            self._failed()
            return False
        return True


def _paced(
    update: Callable[[memoryview, memoryview], int], source: memoryview, target: memoryview
) -> None:
    """Encrypt or decrypt in parts, and yield the processor between them."""
    for at in range(0, len(source), CIPHER_BYTES):
        if at:
            yield_cpu()
        update(source[at : at + CIPHER_BYTES], target[at : at + CIPHER_BYTES])
