"""The core against a plain dictionary: what is stored is found, and nothing else is.

The arena has room for everything and both engines share a namespace: nothing is ever evicted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from tests.core.rig import GRACE_S, LEASE_S, RESERVE_S, Engine, Rig

RANKS = 2
prompts = st.lists(st.sampled_from("abcde"), min_size=1, max_size=5, unique=True).map(tuple)
engines = st.integers(0, 1)
ranks = st.integers(0, RANKS - 1)


@dataclass(eq=False)
class Write:
    """A reservation. ``clean_at``: when a dead writer's bytes cannot land any more."""

    id: int
    engine: int
    keys: tuple[str, ...]
    epoch: int
    deadline: float
    owing: set[int] = field(default_factory=lambda: set(range(RANKS)))
    handed: bool = False
    doomed: bool = False
    clean_at: float = 0.0


@dataclass(eq=False)
class Read:
    """A lease, and which reservation wrote each of its rows."""

    id: int
    engine: int
    rows: list[tuple[str, int]]
    deadline: float
    owing: set[int]
    handed: bool = False


class AgainstADictionary(RuleBasedStateMachine):
    """``ready`` is the model: which reservation wrote what a key holds."""

    writes = Bundle("writes")
    reads = Bundle("reads")

    @initialize()
    def start(self) -> None:
        self.rig = Rig(pages=8000, extent=64)
        self.engines: list[Engine] = [self.rig.engine(f"e{i}", ranks=RANKS) for i in (0, 1)]
        self.ready: dict[str, int] = {}
        self.writing: list[Write] = []
        self.reading: list[Read] = []
        self.epoch = 0

    def settle(self) -> None:
        """What time and the last event brought to an end."""
        now = self.rig.now
        for w in list(self.writing):
            w.doomed = w.doomed or now >= w.deadline
            if not w.owing and now >= w.clean_at:
                self.writing.remove(w)
                if not w.doomed:
                    self.ready.update(dict.fromkeys(w.keys, w.id))
        self.reading = [r for r in self.reading if r.owing and now < r.deadline]

    # ------------------------------------------------------------ writing

    @rule(target=writes, e=engines, prompt=prompts, data=st.data())
    def reserve(self, e: int, prompt: tuple[str, ...], data: Any) -> Any:
        first = data.draw(st.integers(0, len(prompt)))
        grant = self.engines[e].reserve(*prompt, first=first)
        taken = {k for w in self.writing if not w.doomed and w.epoch == self.epoch for k in w.keys}
        taken |= self.ready.keys()
        wanted = tuple(i for i in range(first, len(prompt)) if prompt[i] not in taken)
        assert grant.chunks == wanted
        if not wanted:
            return multiple()
        keys = tuple(prompt[i] for i in wanted)
        write = Write(grant.reservation, e, keys, self.epoch, self.rig.now + RESERVE_S)
        self.writing.append(write)
        return write

    @rule(e=engines, prompt=prompts)
    def store(self, e: int, prompt: tuple[str, ...]) -> None:
        """All of a write at once: reads need something to read."""
        grant = self.engines[e].reserve(*prompt)
        for rank in range(RANKS if grant.reservation else 0):
            self.engines[e].commit(grant.reservation, rank)
        for i in grant.chunks:
            assert prompt[i] not in self.ready
            self.ready[prompt[i]] = grant.reservation

    @rule(w=writes)
    def hand_over_write(self, w: Write) -> None:
        assert self.engines[w.engine].hand_over(reservations=(w.id,)) == []
        w.handed = True

    @rule(w=writes, rank=ranks)
    def commit(self, w: Write, rank: int) -> None:
        assert self.engines[w.engine].commit(w.id, rank) == []
        if rank in w.owing:
            w.doomed = w.doomed or w.epoch != self.epoch
            w.owing.discard(rank)
        self.settle()

    @rule(w=writes, rank=ranks)
    def abort(self, w: Write, rank: int) -> None:
        assert self.engines[w.engine].abort(w.id, rank) == []
        if rank in w.owing:
            w.doomed = True
            w.owing.discard(rank)
        self.settle()

    @rule(w=writes)
    def cancel(self, w: Write) -> None:
        answer = self.engines[w.engine].abort(w.id)
        if w.handed and w in self.writing:
            assert [x.code for x in answer] == ["bad_rank"]
            return
        assert answer == []
        w.owing, w.doomed = set(), True
        self.settle()

    # ------------------------------------------------------------ reading

    @rule(target=reads, e=engines, prompt=prompts, data=st.data())
    def lookup(self, e: int, prompt: tuple[str, ...], data: Any) -> Any:
        first = data.draw(st.integers(0, len(prompt)))
        readers = tuple(data.draw(st.sets(ranks, min_size=1)))
        found = self.engines[e].lookup(*prompt, first=first, readers=readers)
        end = first
        while end < len(prompt) and prompt[end] in self.ready:
            end += 1
        assert (found.chunks, bool(found.lease)) == (end, end > first)
        if end == first:
            return multiple()
        assert found.deadline_s == self.rig.now + LEASE_S
        rows = [(k, self.ready[k]) for k in prompt[first:end]]
        read = Read(found.lease, e, rows, found.deadline_s, set(readers))
        self.reading.append(read)
        return read

    @rule(r=reads)
    def hand_over_read(self, r: Read) -> None:
        assert self.engines[r.engine].hand_over(leases=(r.id,)) == []
        r.handed = True

    @rule(r=reads, rank=ranks)
    def release(self, r: Read, rank: int) -> None:
        assert self.engines[r.engine].release(r.id, rank) == []
        if r in self.reading:
            r.owing.discard(rank)
        self.settle()

    @rule(r=reads)
    def give_back(self, r: Read) -> None:
        answer = self.engines[r.engine].give_back(r.id)
        if r.handed and r in self.reading:
            assert [x.code for x in answer] == ["bad_rank"]
            return
        assert answer == []
        r.owing.clear()
        self.settle()

    # ------------------------------------------------------------ time, death, clearing

    @rule(seconds=st.sampled_from([0.5, GRACE_S, LEASE_S, RESERVE_S]))
    def wait(self, seconds: float) -> None:
        self.rig.wait(seconds)
        self.settle()

    @rule(e=engines)
    def clear(self, e: int) -> None:
        assert self.engines[e].clear() == len(self.ready)
        self.ready.clear()
        self.epoch += 1

    @rule(e=engines, rank=ranks)
    def a_rank_dies_and_comes_back(self, e: int, rank: int) -> None:
        engine, rig = self.engines[e], self.rig
        rig.lose(engine.workers[rank])
        for w in self.writing:
            if w.engine == e and rank in w.owing:
                w.owing.discard(rank)
                w.doomed, w.clean_at = True, rig.now + GRACE_S
        for r in self.reading:
            if r.engine == e:
                r.owing.discard(rank)
        self.settle()
        engine.workers[rank] = rig.open()
        rank_terms = {"rank": rank, "shard": rank, "ranks": RANKS, "world_size": RANKS}
        assert rig.register(engine.workers[rank], f"e{e}", **rank_terms).namespace

    @rule(e=engines)
    def the_scheduler_dies_and_comes_back(self, e: int) -> None:
        engine, rig = self.engines[e], self.rig
        rig.lose(engine.scheduler)
        everything: list[Write | Read] = [*self.writing, *self.reading]
        for held in everything:
            if held.engine == e and not held.handed:
                held.owing.clear()
                if isinstance(held, Write):
                    held.doomed = True
        self.settle()
        engine.scheduler = rig.open()
        assert rig.register(engine.scheduler, f"e{e}", ranks=RANKS, world_size=RANKS).namespace

    @invariant()
    def the_books_agree(self) -> None:
        if not hasattr(self, "rig"):
            return
        pins = sum(len(r.rows) for r in self.reading)
        expected = (len(self.reading), pins, len(self.writing))
        assert self.rig.gauge("leases", "pins", "reservations") == expected


AgainstADictionary.TestCase.settings = settings(max_examples=200, stateful_step_count=50)
TestAgainstADictionary = AgainstADictionary.TestCase
