"""Lives of a core over one index: it is killed, also in the middle of a step, and the next adopts.

``Lives`` is a world with engines, an arena and their processes. The arena knows of each page which
row's bytes it has. ``torn`` is a kill between any two lines of the core, in which some of the words
of the last write have arrived and others have not.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import kvass.core
from kvass import messages as m
from kvass.core.adoption import Adoption
from kvass.core.effects import FormerEnded
from kvass.core.rows.row_table import READY
from kvass.core.saved.index_file import SavedIndex, Unusable, Where, index_bytes
from kvass.types import PAGE, Slots
from tests.core.rig import BOOT, WIDTH, Rig, key

WHERE = Where(b"machine's boot 1", 7)
_CORE = str(Path(kvass.core.__file__).parent)


class Memory:
    """The memory of an index for ``pages`` pages of arena. Only what was allocated is copied."""

    def __init__(self, pages: int = 64) -> None:
        self.bytes = np.zeros(index_bytes(pages * PAGE), np.uint8)
        self.parts = set[tuple[int, int]]()
        self.full = False

    def allocate(self, low: int, high: int) -> bool:
        self.parts.add((low, high))
        return not self.full

    def create(self) -> SavedIndex:
        made = SavedIndex.create(self.bytes, WHERE, self.allocate)
        assert isinstance(made, SavedIndex)
        return made

    def open(self, pages: int = 64, where: Where = WHERE) -> SavedIndex | Unusable:
        return SavedIndex.open(self.bytes, where, self.allocate, pages * PAGE)

    def adopt(self) -> SavedIndex:
        found = self.open()
        assert isinstance(found, SavedIndex), found
        return found

    def copy(self) -> dict[tuple[int, int], np.ndarray[Any, Any]]:
        return {(low, high): self.bytes[low:high].copy() for low, high in self.parts}

    def put_back(self, copy: dict[tuple[int, int], np.ndarray[Any, Any]]) -> None:
        for low, high in self.parts:
            self.bytes[low:high] = copy.get((low, high), 0)


def torn(memory: Memory, act: Callable[[], object], line: int, rng: random.Random) -> bool:
    """Do ``act``, and leave the memory as after ``line`` lines of the core, with some words of the
    next one. Returns whether it had so many."""
    copies: list[dict[tuple[int, int], np.ndarray[Any, Any]]] = []
    left = line

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(_CORE):
            return None
        if event == "line":
            left -= 1
            if left in (0, -1):
                copies.append(memory.copy())
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    if len(copies) < 2:
        return False
    first, second = copies
    for part, words in second.items():
        old = first.get(part, np.zeros_like(words)).view(np.uint64)
        for at in np.flatnonzero(old != words.view(np.uint64)).tolist():
            if rng.random() < 0.5:
                words.view(np.uint64)[at] = old[at]
    memory.put_back(second)
    return True


class Writing:
    """A grant whose ranks have not committed: they write its rows, and may do so after a kill."""

    def __init__(
        self, engine: int, life: int, grant: m.Grant, pages: dict[int, str], names: list[bytes]
    ) -> None:
        self.engine, self.life, self.grant = engine, life, grant
        self.pages, self.names = pages, names


class Reading:
    """A match that an engine reads. ``want``: the bytes that it must find until ``until``."""

    def __init__(self, engine: int, life: int, found: m.Matched, want: dict[int, str]) -> None:
        self.engine, self.life, self.lease = engine, life, found.lease
        self.until, self.want = found.deadline_s, want


class Lives:
    """A world in which the daemon dies often. ``pages``: of its arena, which is full most of the
    time."""

    def __init__(self, seed: int, pages: int = 24) -> None:
        self.rng = random.Random(seed)
        self.memory, self.pages = Memory(pages), pages
        self.arena: dict[int, str] = {}
        """By page: whose bytes it has."""
        self.life, self.now = 0, 100.0
        self.writing: list[Writing] = []
        self.reading: list[Reading] = []
        self.answered = b""
        """The namespace whose clear is confirmed, unless the daemon dies before."""
        self.adopted = self.torn = self.hits = 0
        self.stored: dict[bytes, set[bytes]] = {}
        """By namespace: what was stored since its last clear that was confirmed."""
        self.begin(self.memory.create())

    def start(self, index: SavedIndex) -> None:
        """The daemon starts."""
        self.rig = Rig(self.pages, 4, now=self.now, core={"started_s": self.now}, index=index)

    def begin(self, index: SavedIndex) -> None:
        """The daemon starts, and the engines, which live on, register again."""
        self.start(index)
        self.rig.machine.validate()
        adoption = self.rig.machine.adoption
        assert isinstance(adoption, Adoption)
        self.adopted += adoption.rows
        self.look()
        self.engines = [
            self.rig.engine(f"e{i}", ranks=1 + i, pid=10 * (i + 1), identity={"model": f"m{i}"})
            for i in range(2)
        ]

    # ------------------------------------------------------------ what may be seen

    def look(self) -> None:
        """Every readable row has its own bytes (law 13)."""
        state = self.rig.machine.state
        table, sets = state.rows.table, state.classes.sets
        for ns in state.namespaces.values():
            for row_class in ns.classes:
                rows = row_class.index.rows()
                for row in rows[table.state[rows] >= READY].tolist():
                    assert sets.owner[table.set_of[row]] == row_class.id
                    name = table.key[row].tobytes()[:WIDTH]
                    slots = state.rows.slots(np.array([row]))
                    self.check(self.places(ns.digest, slots, [name]))
                    assert name in self.stored.get(ns.digest, set()), "what was cleared is back"

    def check(self, want: dict[int, str]) -> None:
        for page, name in want.items():
            assert self.arena.get(page) == name, f"page {page}: {self.arena.get(page)}, not {name}"

    def places(self, namespace: bytes, slots: Slots, names: list[bytes]) -> dict[int, str]:
        """Whose bytes each page of ``slots`` must have."""
        found = {}
        for shard in range(len(slots.extents[0]) if slots.extents else 0):
            for at, name in zip(slots.offsets(shard, PAGE).tolist(), names, strict=True):
                found[at // PAGE] = f"{namespace.hex()[:6]} {name!r} {shard}"
        return found

    # ------------------------------------------------------------ what happens

    def step(self) -> None:
        """Something happens at random, and its answer arrives."""
        self.happen()
        self.stored.pop(self.answered, None)
        self.answered = b""

    def happen(self) -> None:
        acts = [self.reserve] * 4 + [self.commit] * 4 + [self.lookup] * 3 + [self.write] * 3
        acts += [self.read] * 2 + [self.release] * 2
        self.rng.choice([*acts, self.wait, self.wait, self.clear])()

    def some(self) -> list[str]:
        first = self.rng.randrange(12)
        return [f"k{first + i}" for i in range(self.rng.randint(1, 4))]

    def reserve(self) -> None:
        number = self.rng.randrange(2)
        engine, names = self.engines[number], self.some()
        grant = engine.reserve(*names)
        if grant.reservation:
            engine.hand_over(reservations=(grant.reservation,))
            mine = [key(names[i]) for i in grant.chunks]
            pages = self.places(engine.namespace, grant.slots[0], mine)
            self.writing.append(Writing(number, self.life, grant, pages, mine))

    def write(self) -> None:
        """A rank that may write does, whatever life its grant is of."""
        if self.writing:
            pages = self.rng.choice(self.writing).pages
            for page in self.rng.sample([*pages], self.rng.randint(1, len(pages))):
                self.arena[page] = pages[page]

    def commit(self) -> None:
        if not (mine := [w for w in self.writing if w.life == self.life]):
            return
        one = self.rng.choice(mine)
        self.writing.remove(one)
        self.arena |= one.pages
        engine = self.engines[one.engine]
        self.stored.setdefault(engine.namespace, set()).update(one.names)
        for rank in range(len(engine.workers)):
            engine.commit(one.grant.reservation, rank)

    def lookup(self) -> None:
        number, names = self.rng.randrange(2), self.some()
        engine = self.engines[number]
        found = engine.lookup(*names)
        if found.lease:
            self.hits += found.chunks
            mine = [key(name) for name in names[: found.chunks]]
            want = self.places(engine.namespace, found.slots[0], mine)
            self.check(want)
            self.reading.append(Reading(number, self.life, found, want))

    def read(self) -> None:
        """All who still read find what they must, until their deadlines (law 5)."""
        self.reading = [one for one in self.reading if one.until > self.now]
        for one in self.reading:
            self.check(one.want)

    def release(self) -> None:
        """A reader has finished."""
        mine = [one for one in self.reading if one.life == self.life and one.until > self.now]
        if mine:
            one = self.rng.choice(mine)
            self.reading.remove(one)
            self.engines[one.engine].give_back(one.lease)

    def wait(self) -> None:
        """Time passes. Former workers end, or say that they are done."""
        self.now += self.rng.choice([0.2, 1.0, 4.0, 11.0])
        self.rig.now = self.now
        late = [w for w in self.writing if w.life == self.life]
        for one in late:  # an engine settles before its deadline, or its worker ends
            self.writing.remove(one)
            for rank in range(len(self.engines[one.engine].workers)):
                self.engines[one.engine].abort(one.grant.reservation, rank)
        self.rig.wait(0)
        number = self.rng.randrange(2)
        if self.rng.random() < 0.5:
            self.writing = [w for w in self.writing if w.engine != number or w.life == self.life]
            for connection in self.engines[number].workers:
                self.rig.say(connection, m.Drained(boot=BOOT))

    def clear(self) -> None:
        if self.rng.random() < 0.3:
            engine = self.rng.choice(self.engines)
            engine.clear()
            self.answered = engine.namespace

    def kill(self) -> None:
        """The daemon dies during or after something, or is stopped, and the next one starts. That
        may die, too, while it adopts."""
        self.rig.finish()
        if self.rng.random() < 0.2:
            self.rig.machine.end()
        elif self.rng.random() < 0.9:
            line = int(self.rng.expovariate(1 / 120)) + 1
            writing, reading = [*self.writing], [*self.reading]
            if torn(self.memory, self.happen, line, self.rng):
                self.answered = b""
                self.torn += 1  # what the step would have answered was never sent
                self.writing = [w for w in self.writing if w in writing]
                self.reading = [r for r in self.reading if r in reading]
        self.stored.pop(self.answered, None)
        self.answered = b""
        if self.rng.random() < 0.2:
            self.now += 30.0
        self.life += 1
        while self.rng.random() < 0.3:
            line = int(self.rng.expovariate(1 / 80)) + 1
            torn(self.memory, lambda: self.start(self.memory.adopt()), line, self.rng)
        self.begin(self.memory.adopt())
        for _ in range(self.rng.randrange(8)):  # what may be reused is reused soon
            self.reserve()
            self.write()
        self.read()
        if self.rng.random() < 0.3:  # an engine has died with the daemon
            self.engine_ends(self.rng.randrange(2))

    def engine_ends(self, number: int) -> None:
        """An engine's former processes are gone; the daemon's watch says so."""
        self.writing = [w for w in self.writing if w.engine != number or w.life == self.life]
        adoption = self.rig.machine.adoption
        assert adoption is not None
        for one in adoption.former:
            if one.pid // 10 == number + 1:
                self.rig.step(FormerEnded(one.number))


def run(seed: int, kills: int = 8, steps: int = 25) -> Lives:
    """A world of ``kills`` lives and one more."""
    lives = Lives(seed)
    for _ in range(kills):
        for _ in range(lives.rng.randint(1, steps)):
            lives.step()
        lives.kill()
    for _ in range(steps):
        lives.step()
    return lives
