"""``RecordTier``: the base class of all built-in tiers. It implements ``Tier`` without a backend.

It checks arguments, lets ``close`` wait for running calls, stores each key of a batch once, and
computes the results of a batch from the outcomes of its records. A backend is a subclass.

Law of this file: a refusal of one record is a value. The tier is down only if the backend gives no
answer, or if a check of the backend itself fails (``proof.py``).
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeAlias

from kvass.errors import ItemRefused, ItemUnreadable, TierDown, UsageError
from kvass.tiers.base import MAX_NOTE_BYTES, Shards, check_batch, check_note
from kvass.tiers.codec import Closing, Header, Open, Opening, Seal
from kvass.tiers.proof import Depth, Proof
from kvass.tiers.refusals import Refusals
from kvass.tiers.worker_pool import as_down
from kvass.types import DEFAULT_TENANT

Outcome: TypeAlias = bool | TierDown
"""The outcome of one record. ``False``: the record is absent, damaged or does not fit.
``ItemRefused``: the backend answered, and refused this record. ``ItemUnreadable``: what it has
there cannot be read and must be replaced. Any other ``TierDown``: the backend failed."""


class Sealing(Protocol):
    """Encrypts and decrypts the records of a tier."""

    def seal(self, tenant: str, key: bytes, lengths: tuple[int, ...]) -> Closing:
        """See ``codec.Seal``. Each tenant's records are encrypted with other keys."""

    def open(self, header: Header) -> Opening | None:
        """See ``codec.Open``."""


class RecordTier(ABC):
    """Implements ``Tier`` with the abstract methods below. Error messages begin with ``name``.

    The abstract methods get valid arguments with at least one key, and are called only while the
    tier is open. They return one ``Outcome`` per key, in the order of the keys, or raise
    ``TierDown`` for the whole batch.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.sealing: Sealing | None = None
        """None: records are not encrypted. Set before the first call. A backend passes ``_seal``
        and ``_open`` on to ``codec``."""
        self._refusals = Refusals(name)
        self._proof = Proof(name, self._get_note, self._put_note)
        self._closing = False
        self._running = 0
        self._changed = threading.Condition()

    @abstractmethod
    def _exists(self, keys: Sequence[bytes]) -> Sequence[Outcome]:
        """Return for each key whether its record is held."""

    @abstractmethod
    def _get(self, keys: Sequence[bytes], into: Sequence[Shards]) -> Sequence[Outcome]:
        """Fill ``into``. Delete a record that is damaged. A key may occur twice."""

    @abstractmethod
    def _put(self, keys: Sequence[bytes], data: Sequence[Shards], tenant: str) -> Sequence[Outcome]:
        """Store records, and replace those of the same keys. A key occurs once."""

    @abstractmethod
    def _delete(self, keys: Sequence[bytes]) -> Sequence[Outcome]:
        """Delete records. A key occurs once."""

    @abstractmethod
    def _clear(self) -> None:
        """Delete all records."""

    @abstractmethod
    def _get_note(self, name: str) -> bytes | None:
        """See ``Tier.note``. ``None`` only if the backend itself said that there is none. What
        is longer than a note may be is cut, but not below ``MAX_NOTE_BYTES + 1``."""

    @abstractmethod
    def _put_note(self, name: str, value: bytes) -> None:
        """See ``Tier.set_note``."""

    def _prove(self, depth: Depth, since: float) -> bool:
        """Raise ``TierDown`` unless the backend was proven since then. See ``Proof.prove``."""
        return self._proof.prove(depth, since)

    @abstractmethod
    def _close(self) -> None:
        """Release all resources. No other call runs any more."""

    def _renew(self) -> None:  # noqa: B027 - a disk has no connections
        """Leave the backend's connections, if it has any: the next call makes new ones and resolves
        names again. Calls that run go on. Called after a ``TierDown``, because a server that was
        replaced behind its address may answer on its old connections for ever."""

    # ------------------------------------------------------------ Tier

    def probe(self, keys: Sequence[bytes]) -> list[bool]:
        check_batch(keys)
        with self._call() as since:
            held = self._answers(self._exists(keys) if keys else [], since)
            return self._refusals.readable(keys, held)

    def load(self, keys: Sequence[bytes], into: Sequence[Shards]) -> list[bool]:
        check_batch(keys, into)
        with self._call() as since:
            outcomes = self._get(keys, into) if keys else []
            held = self._answers(outcomes, since)
            self._refusals.loaded(keys, outcomes)
            return held

    def store(self, keys: Sequence[bytes], data: Sequence[Shards]) -> list[bool]:
        return self.store_for(DEFAULT_TENANT, keys, data)

    def store_for(self, tenant: str, keys: Sequence[bytes], data: Sequence[Shards]) -> list[bool]:
        """See ``DividedTier``. If a key occurs more than once, only its last record is stored."""
        check_batch(keys, data)
        last = dict(zip(keys, data, strict=True))
        with self._call() as since:
            outcomes = self._put(list(last), list(last.values()), tenant) if keys else []
            held = self._answers(outcomes, since, "write")
            self._refusals.stored(list(last), held)
        by_key = dict(zip(last, held, strict=True))
        return [by_key[key] for key in keys]

    def delete(self, keys: Sequence[bytes]) -> None:
        check_batch(keys)
        with self._call() as since, self._one(since, "write"):
            answers(self._delete(list(dict.fromkeys(keys))) if keys else [])

    def clear(self) -> None:
        with self._call() as since, self._one(since, "write"):
            self._clear()
            self._prove("read", time.monotonic())  # a stranger may have answered the clear

    def note(self, name: str) -> bytes | None:
        check_note(name)
        with self._call() as since, self._one(since):
            try:
                value = self._get_note(name)
            except ItemUnreadable as error:  # the next ``set_note`` replaces it
                self._refusals.count([error])
                value = None
            self._prove("read", since)  # a stranger may have answered
            if value is None or len(value) <= MAX_NOTE_BYTES:
                return value
            self._refusals.count([self._too_long()])
            return None

    def set_note(self, name: str, value: bytes) -> None:
        check_note(name, value)
        with self._call() as since, self._one(since):
            try:
                self._put_note(name, value)
            except (TierDown, OSError) as error:  # one that takes no writes can still be read
                self._renew()
                raise ItemRefused(str(as_down(self.name, error))) from None
            self._prove("read", time.monotonic())

    def check_store(self, whole: bool = True) -> bool:
        """See ``ProvingTier``."""
        with self._call() as since:
            return self._prove("try" if whole else "read", since)

    def report(self) -> dict[str, Any]:
        """Return the tier's fields of ``kvass status``."""
        return self._refusals.report()

    def close(self) -> None:
        with self._changed:
            first, self._closing = not self._closing, True
            self._changed.wait_for(lambda: not self._running)
        if first:
            self._close()

    @contextmanager
    def _call(self) -> Iterator[float]:
        """The context of every call but ``close``: counts the running calls, and renews connections
        after a failure. Gives the time at which the call began. Raises ``UsageError`` if the tier
        is closed."""
        with self._changed:
            if self._closing:
                raise UsageError(f"{self.name}: this tier is closed")
            self._running += 1
        try:
            yield time.monotonic()
        except ItemRefused:
            raise
        except TierDown:
            self._renew()
            raise
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    @contextmanager
    def _one(self, since: float, depth: Depth = "read") -> Iterator[None]:
        """The context of one request: if it is refused, raise what is wrong with the backend
        itself, if anything is; else ``ItemRefused``."""
        try:
            yield
        except ItemRefused as error:
            self._prove(depth, since)
            self._refusals.count([error])
            raise

    def _answers(
        self, outcomes: Sequence[Outcome], since: float, depth: Depth = "read"
    ) -> list[bool]:
        """Return for each outcome whether it is ``True``. Raises ``TierDown`` if none is, and the
        backend failed. A refused record has failed, but the backend only if a check of it fails,
        too."""
        try:
            held = answers(outcomes)
        except ItemRefused:
            self._prove(depth, since)
            held = [False] * len(outcomes)
        self._refusals.count(outcomes)
        return held

    def _seal(self, tenant: str) -> Seal | None:
        return None if self.sealing is None else partial(self.sealing.seal, tenant)

    @property
    def _open(self) -> Open | None:
        return None if self.sealing is None else self.sealing.open

    def _down(self, why: object) -> TierDown:
        return TierDown(f"{self.name}: {why}")

    def _too_long(self) -> ItemRefused:
        """The outcome of a value that is longer than a record or a note of that name can be."""
        return ItemRefused(f"{self.name}: a value that is longer than ours can be")

    def _undeletable(self, why: TierDown) -> ItemUnreadable:
        """The outcome of a damaged record that could not be deleted."""
        text = str(why).removeprefix(f"{self.name}: ")
        return ItemUnreadable(f"{self.name}: it is damaged, and cannot be deleted: {text}")


def answers(outcomes: Sequence[Outcome]) -> list[bool]:
    """Return for each outcome whether it is ``True``. If none is, raise the first ``TierDown``
    among them, one that is no ``ItemRefused`` if there is one."""
    held = [outcome is True for outcome in outcomes]
    failures = [outcome for outcome in outcomes if isinstance(outcome, TierDown)]
    if failures and not any(held):
        failures.sort(key=lambda failure: isinstance(failure, ItemRefused))
        raise type(failures[0])(str(failures[0]))
    return held
