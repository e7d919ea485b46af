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
from kvass.tiers.codec import Header
from kvass.tiers.gate import Gate
from kvass.tiers.mooncake.bounce import BounceBuffer
from kvass.tiers.mooncake.client import (
    ABSENT,
    LEASE_OVER,
    NO_ROOM,
    OTHER_SIZE,
    MooncakeClient,
    lasting,
    meaning,
    plain,
)
from kvass.tiers.mooncake.transfer import ObjectTransfer
from kvass.tiers.options import MooncakeOptions

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

    def __init__(self, name: str, master: tuple[str, int], options: MooncakeOptions) -> None:
        self._name = name
        self._prefix = options.prefix
        self._gate = Gate(name)
        self._bounce = BounceBuffer(options.bounce)
        self._mooncake = MooncakeClient(name, master, options, self._bounce.memory)
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
            self._mooncake.announce(buffer)

    def probe(self, keys: Sequence[bytes]) -> list[bool]:
        """Which the master knows of; one round trip."""
        check_batch(keys)
        with self._gate.call():
            client = self._mooncake.client()
            codes = client.batch_is_exist([self._record(key) for key in keys]) if keys else []
            trouble = "the master does not tell"
            return self._judged([trouble if code < 0 else code == 1 for code in codes])

    def load(self, keys: Sequence[bytes], into: Sequence[Shards]) -> list[bool]:
        """See ``Tier.load``."""
        check_batch(keys, into)
        with self._gate.call():
            pairs = zip(keys, into, strict=True)
            wanted = [self._transfer(self._record(key), key, shards) for key, shards in pairs]
            return self._judged(self._in_groups(wanted, self._fetch))

    def store(self, keys: Sequence[bytes], data: Sequence[Shards]) -> list[bool]:
        """See ``Tier.store``."""
        check_batch(keys, data)
        with self._gate.call():
            last = dict(zip(keys, data, strict=True))
            transfers = [self._transfer(self._record(key), key, last[key], 1) for key in last]
            done = dict(zip(last, self._in_groups(transfers, self._put), strict=True))
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
            code = self._mooncake.client().remove_by_regex(pattern, True)
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
            transfer = self._transfer(self._note(name, number % 2), name.encode(), [shard], number)
            [answer] = self._in_groups([transfer], self._put_lasting)
            if not isinstance(answer, Header):
                raise TierDown(f"{self._name}: {answer or meaning(NO_ROOM)}")

    def close(self) -> None:
        """See ``Tier.close``. With it goes the memory that we contributed, and what lay in it."""
        if self._gate.shut():
            self._helpers.shutdown()
            self._mooncake.close()

    # ------------------------------------------------------------ names

    def _record(self, key: bytes) -> str:
        return f"{self._prefix}r:{key.hex()}"

    def _note(self, name: str, place: int) -> str:
        """Two places take turns, so that the one before stays while the next is written."""
        return f"{self._prefix}n{place}:{name}"

    def _newest(self, name: str) -> tuple[int, bytes | None]:
        room = np.zeros((2, _NOTE), np.uint8)
        transfers = [
            self._transfer(self._note(name, i), name.encode(), [room[i]]) for i in range(2)
        ]
        answers = self._in_groups(transfers, self._fetch)
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

    def _transfer(self, name: str, key: bytes, shards: Shards, sequence: int = 0) -> ObjectTransfer:
        header = Header(key, tuple(map(len, shards)), sequence, 0)
        return ObjectTransfer(name, header, shards, self._mooncake.direct)

    def _in_groups(
        self, transfers: list[ObjectTransfer], move: Callable[[list[ObjectTransfer]], list[Answer]]
    ) -> list[Answer]:
        """``move`` of neighbours that are not too much at a time.

        Two groups at a time: while one is on the wire the checksums of the other are made.
        """
        groups = list(self._groups(transfers))
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
        self, group: list[ObjectTransfer], move: Callable[[list[ObjectTransfer]], list[Answer]]
    ) -> list[Answer]:
        """``move`` with room to lie in."""
        need = sum(transfer.head + transfer.bounced for transfer in group)
        if need > len(self._bounce.memory):  # then it is one
            self._say_once("a record needs more than the bounce buffer: give bounce=SIZE")
            return [None]
        with self._bounce.piece(need) as room:
            at = 0
            for transfer in group:
                transfer.lie(room[at : at + transfer.head + transfer.bounced])
                at += transfer.head + transfer.bounced
            answers = move(group)
        with self._counting:
            self.bounced_bytes += sum(transfer.bounced for transfer in group)
        return answers

    def _groups(self, transfers: list[ObjectTransfer]) -> Iterator[list[ObjectTransfer]]:
        group: list[ObjectTransfer] = []
        size = bounced = 0
        for transfer in transfers:
            size, bounced = size + transfer.size, bounced + transfer.head + transfer.bounced
            full = size > _GROUP_BYTES or bounced > len(self._bounce.memory) // 2
            if group and (full or len(group) == _GROUP_RECORDS):
                yield group
                group, size, bounced = [], transfer.size, transfer.head + transfer.bounced
            group.append(transfer)
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

    def _fetch(self, transfers: list[ObjectTransfer]) -> list[Answer]:
        """Load them; what is found damaged twice is removed, so that it can be stored again."""
        client = self._mooncake.client()
        answers: list[Answer] = [None] * len(transfers)
        left = list(range(len(transfers)))
        for _ in range(2):
            asked = [transfers[i] for i in left]
            codes = client.batch_get_into_multi_buffers(*_requests(asked))
            damaged = []
            for i, transfer, code in zip(left, asked, codes, strict=True):
                found = transfer.found() if code in (transfer.size, LEASE_OVER) else None
                if found is not None and found.lengths != transfer.header.lengths:
                    answers[i] = None
                elif found is not None and transfer.arrive(found):
                    answers[i] = found
                elif code == transfer.size:
                    damaged.append(i)
                else:
                    answers[i] = self._why_not(transfer, code)
            if not (left := damaged):
                return answers
        self._remove([transfers[i].name for i in left])
        return answers

    def _why_not(self, transfer: ObjectTransfer, code: int) -> str | None:
        """An object of another size is a miss; the library does not say that it is."""
        if code in ABSENT or code >= 0:
            return None
        size = (
            self._mooncake.client().get_size(transfer.name) if code in OTHER_SIZE else transfer.size
        )
        return meaning(code) if size == transfer.size else None

    def _put(self, transfers: list[ObjectTransfer]) -> list[Answer]:
        return self._replace(transfers, plain())

    def _put_lasting(self, transfers: list[ObjectTransfer]) -> list[Answer]:
        return self._replace(transfers, lasting(_NOTE_COPIES))

    def _replace(self, transfers: list[ObjectTransfer], how: Any) -> list[Answer]:
        """Put those that are not there already; what another thread puts just now is waited for."""
        client = self._mooncake.client()
        for transfer in transfers:
            transfer.sign()
        names = [transfer.name for transfer in transfers]
        with self._alone(names):
            there = client.batch_is_exist(names)
            if all(code < 0 for code in there):
                return ["the master does not tell"] * len(transfers)
            answers = self._unlike([p for p, code in zip(transfers, there, strict=True) if code])
            todo = []
            for transfer in transfers:
                if answers.setdefault(transfer.name, None) is None:
                    transfer.depart()
                    todo.append(transfer)
            for _ in range(_ROOM_TRIES):
                codes = client.batch_put_from_multi_buffers(*_requests(todo), how) if todo else []
                for transfer, code in zip(todo, codes, strict=True):
                    answers[transfer.name] = _kept(transfer, code)
                todo = [p for p, code in zip(todo, codes, strict=True) if code == NO_ROOM]
                if not todo:
                    break
                time.sleep(_ROOM_S)
            else:
                self._say_once(meaning(NO_ROOM))
            return [answers[name] for name in names]

    def _unlike(self, transfers: list[ObjectTransfer]) -> dict[str, Answer]:
        """Of objects that exist: held, if of our size and header, else removed, or trouble."""
        sizes = self._mooncake.sizes([p.name for p in transfers])
        alike = [p for p in transfers if sizes.get(p.name) == p.size]
        heads = [(p.name, p.addresses[0], p.head) for p in alike]
        answers: dict[str, Answer] = {
            p.name: p.header
            for p, read in zip(alike, self._mooncake.read_beginnings(heads), strict=True)
            if read and p.same_head()
        }
        others = [p.name for p in transfers if p.name not in answers]
        removed = zip(others, self._remove(others), strict=True)
        return answers | {name: trouble for name, trouble in removed if trouble}

    def _remove(self, names: list[str]) -> list[str]:
        """What keeps each from going, if anything; a lease, which each reader takes, does not."""
        codes = self._mooncake.client().batch_remove(names, True) if names else []
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


def _requests(
    transfers: list[ObjectTransfer],
) -> tuple[list[str], list[list[int]], list[list[int]]]:
    return (
        [p.name for p in transfers],
        [p.addresses for p in transfers],
        [p.sizes for p in transfers],
    )


def _kept(transfer: ObjectTransfer, code: int) -> Answer:
    if code == 0:
        return transfer.header
    return None if code == NO_ROOM else meaning(code)


def open_mooncake(where: str, options: MooncakeOptions) -> MooncakeTier:
    """``mooncake:HOST[:PORT]?...``, the master's; ``ConfigError``, connects nowhere."""
    name = f"mooncake:{where}"
    host, _, port = where.rpartition(":") if ":" in where else (where, "", _PORT)
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{name}: {port!r} is no port; write mooncake:HOST:PORT")
    master = host.removeprefix("[").removesuffix("]"), int(port)
    return MooncakeTier(name, master, options)
