"""Records in a Mooncake Store: the memory of many machines, and one master that knows who has what.

Law of this file: one record is one object, header and shards in one piece, and nothing is believed
that the header's checksum does not cover. An object cannot be changed: to replace one is to remove
it and put another, between which it is a miss. A reader may still be reading the memory of one that
was removed, and then sees a mixture: that fails the checksum, is read once more, and if it fails
again counts as damaged. An object that has our header already is left as it is.

Records live as long as whoever contributed the memory they lie in, and the master; it evicts them
as it sees fit. Nothing is connected at start. See ``mooncake_link`` for what bounds a call.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import numpy as np

from kvass.errors import ConfigError, TierDown
from kvass.tiers.base import MAX_NOTE_BYTES, Buffer, Shards, check_batch, check_note
from kvass.tiers.bounce import Bounce
from kvass.tiers.codec import Header
from kvass.tiers.gate import Gate
from kvass.tiers.mooncake_link import (
    ABSENT,
    LEASE_OVER,
    NO_ROOM,
    OTHER_SIZE,
    Link,
    Settings,
    lasting,
    meaning,
    plain,
)
from kvass.tiers.parcel import Parcel
from kvass.types import Size

_log = logging.getLogger("kvass.tiers")

_GROUP_BYTES: Final = 32 << 20
"""What is asked for at a time; the library gives up on a request after a minute."""
_HELPERS: Final = 4
"""Threads of ours, of all calls together."""
_GROUP_RECORDS: Final = 16
"""Four go to an owner at a time, and one that stands still keeps each for ``timeout_s``: together
they must be over within that minute."""
_ROOM_TRIES: Final = 5
_ROOM_S: Final = 0.02
"""The master evicts some time after it refused."""
_PORT: Final = "50051"
"""The master's, by default."""
_SEGMENT: Final = Size(16 << 20)
_BOUNCE: Final = Size(1 << 20)
_MOST_S: Final = 30
"""The library returns after a minute whatever happens, and may still write to our memory then:
its own limits must have ended the transfer by that time."""
_NOTE: Final = 2 + MAX_NOTE_BYTES
_NOTE_COPIES: Final = 3

Answer: TypeAlias = Header | str | None
"""Held, with this header; trouble, in words; or not held."""


class MooncakeTier:
    """``Tier`` over a Mooncake Store.

    Beyond the protocol there is ``register_memory``, to be called once, with all of the memory that
    most buffers will lie in: those go straight from and to it. Others, small ones (``WORTH_IT``),
    and all if it cannot be registered, are copied once more, by way of ``bounce`` bytes that all
    calls share; a record that needs more is refused. ``bounced_bytes`` counts what was copied so.
    """

    def __init__(self, name: str, settings: Settings, *, prefix: str, bounce: int) -> None:
        self._name = name
        self._prefix = prefix
        self._gate = Gate(name)
        self._bounce = Bounce(bounce)
        self._link = Link(name, settings, self._bounce.memory)
        self._storing: set[str] = set()
        self._stored = threading.Condition()
        self._noting = threading.Lock()
        self._helpers = ThreadPoolExecutor(_HELPERS, thread_name_prefix="kvass-mooncake")
        self._counting = threading.Lock()
        self._said: set[str] = set()
        self.bounced_bytes = 0

    def register_memory(self, buffer: Buffer) -> None:
        """Buffers inside go straight from now on. The memory must stay until ``close`` is over."""
        with self._gate.call():
            self._link.announce(buffer)

    def probe(self, keys: Sequence[bytes]) -> list[bool]:
        """Which the master knows of; one round trip."""
        check_batch(keys)
        with self._gate.call():
            client = self._link.client()
            codes = client.batch_is_exist([self._record(key) for key in keys]) if keys else []
            trouble = "the master does not tell"
            return self._judged([trouble if code < 0 else code == 1 for code in codes])

    def load(self, keys: Sequence[bytes], into: Sequence[Shards]) -> list[bool]:
        """See ``Tier.load``."""
        check_batch(keys, into)
        with self._gate.call():
            pairs = zip(keys, into, strict=True)
            wanted = [self._parcel(self._record(key), key, shards) for key, shards in pairs]
            return self._judged(self._in_groups(wanted, self._fetch))

    def store(self, keys: Sequence[bytes], data: Sequence[Shards]) -> list[bool]:
        """See ``Tier.store``."""
        check_batch(keys, data)
        with self._gate.call():
            last = dict(zip(keys, data, strict=True))
            parcels = [self._parcel(self._record(key), key, last[key], 1) for key in last]
            done = dict(zip(last, self._in_groups(parcels, self._put), strict=True))
            return self._judged([done[key] for key in keys])

    def delete(self, keys: Sequence[bytes]) -> None:
        """See ``Tier.delete``."""
        check_batch(keys)
        with self._gate.call():
            names = [self._record(key) for key in dict.fromkeys(keys)]
            self._judged([trouble or True for trouble in self._remove(names)])

    def clear(self) -> None:
        """Forget all under our prefix, whoever stored it."""
        with self._gate.call():
            pattern = "^" + re.sub(r"([./-])", r"\\\1", self._prefix) + "r:"
            code = self._link.client().remove_by_regex(pattern, True)
            if code < 0:
                raise TierDown(f"{self._name}: {meaning(code)}")

    def note(self, name: str) -> bytes | None:
        """See ``Tier.note``. A damaged one is none."""
        check_note(name)
        with self._gate.call():
            return self._newest(name)[1]

    def set_note(self, name: str, value: bytes) -> None:
        """See ``Tier.set_note``: as durable as the memory of several machines, if there are."""
        check_note(name, value)
        shard = np.zeros(_NOTE, np.uint8)
        shard[: 2 + len(value)] = memoryview(len(value).to_bytes(2, "little") + value)
        with self._gate.call(), self._noting:
            number = self._newest(name)[0] + 1
            parcel = self._parcel(self._note(name, number % 2), name.encode(), [shard], number)
            [answer] = self._in_groups([parcel], self._put_lasting)
            if not isinstance(answer, Header):
                raise TierDown(f"{self._name}: {answer or meaning(NO_ROOM)}")

    def close(self) -> None:
        """See ``Tier.close``. With it goes the memory that we contributed, and what lay in it."""
        if self._gate.shut():
            self._helpers.shutdown()
            self._link.close()

    # ------------------------------------------------------------ names

    def _record(self, key: bytes) -> str:
        return f"{self._prefix}r:{key.hex()}"

    def _note(self, name: str, place: int) -> str:
        """Two places take turns, so that the one before stays while the next is written."""
        return f"{self._prefix}n{place}:{name}"

    def _newest(self, name: str) -> tuple[int, bytes | None]:
        room = np.zeros((2, _NOTE), np.uint8)
        parcels = [self._parcel(self._note(name, i), name.encode(), [room[i]]) for i in range(2)]
        answers = self._in_groups(parcels, self._fetch)
        found = [(a.sequence, i) for i, a in enumerate(answers) if isinstance(a, Header)]
        for answer in answers:
            if isinstance(answer, str):  # it may be the newer one
                raise TierDown(f"{self._name}: {answer}")
        if not found:
            return 0, None
        sequence, i = max(found)
        length = int.from_bytes(room[i, :2].tobytes(), "little")
        return sequence, room[i, 2 : 2 + length].tobytes()

    # ------------------------------------------------------------ in groups

    def _parcel(self, name: str, key: bytes, shards: Shards, sequence: int = 0) -> Parcel:
        header = Header(key, tuple(map(len, shards)), sequence, 0)
        return Parcel(name, header, shards, self._link.direct)

    def _in_groups(
        self, parcels: list[Parcel], move: Callable[[list[Parcel]], list[Answer]]
    ) -> list[Answer]:
        """``move`` of neighbours that are not too much at a time.

        Two groups at a time: while one is on the wire the checksums of the other are made.
        """
        groups = list(self._groups(parcels))
        left = iter(enumerate(groups))
        answers: list[list[Answer]] = [[]] * len(groups)
        lost: list[Answer] = []

        def work() -> None:
            for i, group in left:
                answers[i] = lost[:1] * len(group) if lost else self._moved(group, move)
                if all(isinstance(answer, str) for answer in answers[i]):
                    lost.append(answers[i][0])  # no use to wait for more of it

        helper = self._helpers.submit(work) if len(groups) > 1 else None
        try:
            work()
        finally:
            if helper is not None and not helper.cancel():
                wait([helper])
        if helper is not None and not helper.cancelled():
            helper.result()
        return [answer for group in answers for answer in group]

    def _moved(
        self, group: list[Parcel], move: Callable[[list[Parcel]], list[Answer]]
    ) -> list[Answer]:
        """``move`` with room to lie in."""
        need = sum(parcel.head + parcel.bounced for parcel in group)
        if need > len(self._bounce.memory):  # then it is one
            self._say_once("a record needs more than the bounce buffer: give bounce=SIZE")
            return [None]
        with self._bounce.piece(need) as room:
            at = 0
            for parcel in group:
                parcel.lie(room[at : at + parcel.head + parcel.bounced])
                at += parcel.head + parcel.bounced
            answers = move(group)
        with self._counting:
            self.bounced_bytes += sum(parcel.bounced for parcel in group)
        return answers

    def _groups(self, parcels: list[Parcel]) -> Iterator[list[Parcel]]:
        group: list[Parcel] = []
        size = bounced = 0
        for parcel in parcels:
            size, bounced = size + parcel.size, bounced + parcel.head + parcel.bounced
            full = size > _GROUP_BYTES or bounced > len(self._bounce.memory) // 2
            if group and (full or len(group) == _GROUP_RECORDS):
                yield group
                group, size, bounced = [], parcel.size, parcel.head + parcel.bounced
            group.append(parcel)
        if group:
            yield group

    def _judged(self, answers: Sequence[Answer | bool]) -> list[bool]:
        """Which answers say yes. ``TierDown`` if none does, and one of them is trouble."""
        done = [answer is True or isinstance(answer, Header) for answer in answers]
        trouble = next((answer for answer in answers if isinstance(answer, str)), None)
        if trouble is not None and not any(done):
            raise TierDown(f"{self._name}: {trouble}")
        return done

    # ------------------------------------------------------------ objects

    def _fetch(self, parcels: list[Parcel]) -> list[Answer]:
        """Load them; what is found damaged twice is removed, so that it can be stored again."""
        client = self._link.client()
        answers: list[Answer] = [None] * len(parcels)
        left = list(range(len(parcels)))
        for _ in range(2):
            asked = [parcels[i] for i in left]
            codes = client.batch_get_into_multi_buffers(*_requests(asked))
            damaged = []
            for i, parcel, code in zip(left, asked, codes, strict=True):
                found = parcel.found() if code in (parcel.size, LEASE_OVER) else None
                if found is not None and found.lengths != parcel.header.lengths:
                    answers[i] = None
                elif found is not None and parcel.arrive(found):
                    answers[i] = found
                elif code == parcel.size:
                    damaged.append(i)
                else:
                    answers[i] = self._why_not(parcel, code)
            if not (left := damaged):
                return answers
        self._remove([parcels[i].name for i in left])
        return answers

    def _why_not(self, parcel: Parcel, code: int) -> str | None:
        """An object of another size is a miss; the library does not say that it is."""
        if code in ABSENT or code >= 0:
            return None
        size = self._link.client().get_size(parcel.name) if code in OTHER_SIZE else parcel.size
        return meaning(code) if size == parcel.size else None

    def _put(self, parcels: list[Parcel]) -> list[Answer]:
        return self._replace(parcels, plain())

    def _put_lasting(self, parcels: list[Parcel]) -> list[Answer]:
        return self._replace(parcels, lasting(_NOTE_COPIES))

    def _replace(self, parcels: list[Parcel], how: Any) -> list[Answer]:
        """Put those that are not there already; what another thread puts just now is waited for."""
        client = self._link.client()
        for parcel in parcels:
            parcel.sign()
        names = [parcel.name for parcel in parcels]
        with self._alone(names):
            there = client.batch_is_exist(names)
            if all(code < 0 for code in there):
                return ["the master does not tell"] * len(parcels)
            answers = self._unlike([p for p, code in zip(parcels, there, strict=True) if code])
            todo = []
            for parcel in parcels:
                if answers.setdefault(parcel.name, None) is None:
                    parcel.depart()
                    todo.append(parcel)
            for _ in range(_ROOM_TRIES):
                codes = client.batch_put_from_multi_buffers(*_requests(todo), how) if todo else []
                for parcel, code in zip(todo, codes, strict=True):
                    answers[parcel.name] = _kept(parcel, code)
                todo = [p for p, code in zip(todo, codes, strict=True) if code == NO_ROOM]
                if not todo:
                    break
                time.sleep(_ROOM_S)
            else:
                self._say_once(meaning(NO_ROOM))
            return [answers[name] for name in names]

    def _unlike(self, parcels: list[Parcel]) -> dict[str, Answer]:
        """Of objects that exist: held, if of our size and header, else removed, or trouble."""
        sizes = self._link.sizes([p.name for p in parcels])
        alike = [p for p in parcels if sizes.get(p.name) == p.size]
        heads = [(p.name, p.addresses[0], p.head) for p in alike]
        answers: dict[str, Answer] = {
            p.name: p.header
            for p, read in zip(alike, self._link.read_beginnings(heads), strict=True)
            if read and p.same_head()
        }
        others = [p.name for p in parcels if p.name not in answers]
        removed = zip(others, self._remove(others), strict=True)
        return answers | {name: trouble for name, trouble in removed if trouble}

    def _remove(self, names: list[str]) -> list[str]:
        """What keeps each from going, if anything; a lease, which each reader takes, does not."""
        codes = self._link.client().batch_remove(names, True) if names else []
        return ["" if code == 0 or code in ABSENT else meaning(code) for code in codes]

    @contextmanager
    def _alone(self, names: list[str]) -> Iterator[None]:
        """Nobody else in this process replaces one of these meanwhile."""
        with self._stored:
            self._stored.wait_for(lambda: self._storing.isdisjoint(names))
            self._storing.update(names)
        try:
            yield
        finally:
            with self._stored:
                self._storing.difference_update(names)
                self._stored.notify_all()

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            _log.warning("%s: %s", self._name, text)


def _requests(parcels: list[Parcel]) -> tuple[list[str], list[list[int]], list[list[int]]]:
    return [p.name for p in parcels], [p.addresses for p in parcels], [p.sizes for p in parcels]


def _kept(parcel: Parcel, code: int) -> Answer:
    if code == 0:
        return parcel.header
    return None if code == NO_ROOM else meaning(code)


def open_mooncake(
    where: str,
    *,
    metadata: str = "P2PHANDSHAKE",
    protocol: str = "tcp",
    devices: str = "",
    segment: str = "0",
    bounce: str = "64MiB",
    hostname: str = "",
    prefix: str = "kvass:",
    timeout_s: str = "3",
) -> MooncakeTier:
    """``mooncake:HOST[:PORT]?...``, the master's; ``ConfigError``, connects nowhere.

    ``segment``: how much of this machine's memory holds records, everybody's; 0: none.
    """
    name = f"mooncake:{where}"
    host, _, port = where.rpartition(":") if ":" in where else (where, "", _PORT)
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{name}: {port!r} is no port; write mooncake:HOST:PORT")
    if protocol not in ("tcp", "rdma"):
        raise ConfigError(f"{name}: protocol: {protocol!r} is neither tcp nor rdma")
    if not metadata:
        raise ConfigError(f"{name}: metadata: give a server's URL, or leave it out")
    if not re.fullmatch(r"[0-9A-Za-z._:/-]{1,100}", prefix):
        raise ConfigError(f"{name}: prefix: 1 to 100 of 0-9 A-Z a-z . _ : / -, not {prefix!r:.120}")
    if not timeout_s.isdecimal() or not 1 <= int(timeout_s) <= _MOST_S:
        raise ConfigError(f"{name}: timeout_s: {timeout_s!r} is not in 1..{_MOST_S}")
    settings = Settings(
        host=host.removeprefix("[").removesuffix("]"),
        port=int(port),
        metadata=metadata,
        protocol=protocol,
        devices=devices,
        segment=_size(name, "segment", segment, _SEGMENT),
        hostname=hostname,
        timeout_s=int(timeout_s),
    )
    room = _size(name, "bounce", bounce, _BOUNCE)
    if not room:
        raise ConfigError(f"{name}: bounce: at least {_BOUNCE}: headers lie there")
    return MooncakeTier(name, settings, prefix=prefix, bounce=room)


def _size(name: str, option: str, text: str, least: Size) -> int:
    try:
        size = Size.parse(text)
    except ValueError as error:
        raise ConfigError(f"{name}: {option}: {error}") from error
    if 0 < size < least:
        raise ConfigError(f"{name}: {option}: {size} is less than {least}")
    return size
