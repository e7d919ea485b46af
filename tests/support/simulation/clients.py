"""Simulated clients: engines of several processes, their connections, and the arena they write to.

All chance comes from the world's generator. A process knows only what a real one knows: what it has
read so far, and the host's clock.

Engines keep the rules of kvass's clients: a scheduler sends ``HandedOver`` before its ranks hear of
a grant or a match, and a worker refuses what was issued before its own connection began. Still, a
process may die, stall, give back, repeat a message or send it too late at any point.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, TypeVar

from kvass import messages as m
from kvass.types import DEVICE_S, SCHEDULER, Slots
from tests.support.simulation.random_models import WIDTH, Model
from tests.support.simulation.segments import SegmentUser
from tests.support.witness.records import BrokenLawError, Place, Tag, list_places

if TYPE_CHECKING:
    from tests.support.simulation.world import World


@dataclass(eq=False, slots=True)
class ArenaContents:
    """The arena of one boot: which writer last wrote each page."""

    boot: bytes
    pages: dict[int, Tag | None] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class ClientConnection:
    """One connection, seen from the client: the messages on their way in both directions."""

    connection: int
    since: float = inf  # when it registered; what was issued earlier is not for this connection
    sent: deque[m.FromClient | None] = field(default_factory=deque)  # None: garbage bytes
    inbox: deque[m.FromDaemon] = field(default_factory=deque)
    asked: dict[int, m.Request] = field(default_factory=dict)
    seq: int = 2
    closing: bool = False  # the client closed it: EOF follows what it sent
    hung_up: bool = False  # the daemon closed it
    visible: bool = False  # the daemon can see its process end
    exits: bool = False  # it was closed because its process exits
    ends: float = inf  # when its process has ended

    def ask(self, message: m.Request) -> None:
        self.seq = message.seq = self.seq + 1
        self.asked[self.seq] = message
        self.sent.append(message)


Item = TypeVar("Item")


def some(rng: random.Random, among: list[Item]) -> list[Item]:
    """A quarter of ``among``, at least one: so a world of 33 processes advances like one of 3."""
    return rng.sample(among, -(-len(among) // 4))


# ---------------------------------------------------------------- engines


@dataclass(eq=False, slots=True)
class Held:
    """A match or a grant that an engine holds."""

    writes: bool
    id: int
    issued: float
    deadline: float
    ranks: tuple[int, ...]
    rows: list[Place]
    memory: ArenaContents
    expect: dict[int, Tag | None] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Job:
    """A worker's part of it: ``left`` are the pages yet to be written or read."""

    held: Held
    left: list[tuple[int, Tag | None]]
    looked: bool = False


@dataclass(eq=False, slots=True)
class Process:
    """One process of an engine: its connection, and the copies it runs."""

    rank: int
    peer: ClientConnection | None = None
    jobs: list[Job] = field(default_factory=list)


class SimulatedEngine:
    """An instance: a scheduler and its workers, each of which may die or stall at any point."""

    def __init__(self, name: str, model: Model, world: World) -> None:
        self.name = name
        self.model = model
        self.world = world
        self.scheduler = Process(SCHEDULER)
        self.workers = [Process(r) for r in range(model.ranks)]
        self.held: list[Held] = []
        self.complete = False  # the scheduler was told that all ranks have registered
        self.generation, self.generations = b"", 0
        self.trainer: random.Random | None = None  # when its weights are replaced in place
        self.segments: SegmentUser | None = None
        self.requests = self.reads = self.late_reads = self.deaths = 0

    @property
    def processes(self) -> list[Process]:
        return [self.scheduler, *self.workers]

    # ------------------------------------------------------------ sockets

    def connect(self, process: Process) -> ClientConnection:
        peer = process.peer = self.world.connect()
        hello = m.Hello(seq=1, clock_s=self.world.now)
        hello.wants_arena = process.rank >= 0
        peer.sent.append(hello)
        peer.ask(self._register(process.rank))
        return peer

    def _register(self, rank: int) -> m.Register:
        said = self.model.register(self.name, rank)
        if rank == SCHEDULER:
            said.generation = self.generation
        return said

    def die(self, process: Process) -> None:
        """The process ends, or only closes its connection; its bytes may still land.

        Later it, or another one in its place, connects again.
        """
        rng, peer = self.world.rng, process.peer
        self.deaths += 1
        until = self.world.now if peer is None else self._give_up(peer)
        for job in process.jobs:
            if job.held.writes and not self._stale(process, job) and rng.random() < 0.7:
                self.world.straggle(job.held.memory, job.left, until)
        process.jobs.clear()
        if process is self.scheduler:
            self.held.clear()
            self.complete = False
            if self.trainer is not None and self.trainer.random() < 0.5:
                self.generation = b""  # a new process reads its weights from disk
        if peer is not None:
            peer.closing = True
            process.peer = None

    def _give_up(self, peer: ClientConnection) -> float:
        """Close a connection; returns until when the process's device may still write: the time
        that the daemon allows for (``core/pending/settlement.py``).
        A visible exit may take long."""
        rng, now, grace_s = self.world.rng, self.world.now, self.world.timing.lost_engine_grace_s
        peer.exits = rng.random() < 0.7
        peer.ends = now + rng.choice([0.0, rng.random() * grace_s, rng.random() * 4 * grace_s])
        stops = peer.ends + min(DEVICE_S, grace_s) if peer.visible else inf
        return stops if peer.visible and peer.exits else min(stops, now + grace_s)

    def daemon_gone(self, memory: ArenaContents | None) -> None:
        """All connections break. Copies go on in the old mapping, but not those already void."""
        for process in self.processes:
            since = inf if process.peer is None else process.peer.since
            process.jobs = [
                job
                for job in process.jobs
                if job.held.memory is not memory or job.held.issued >= since
            ]
            process.peer = None
        self.held.clear()
        self.complete = False

    def hear(self, process: Process, peer: ClientConnection) -> None:
        """Read the next reply, or find that the daemon closed the connection."""
        if not peer.inbox:
            self.die(process)
            return
        reply = peer.inbox.popleft()
        if isinstance(reply, m.Promoting):
            return  # the answer follows
        asked = peer.asked.pop(reply.seq, None)
        if isinstance(reply, m.Matched) and isinstance(asked, m.Lookup):
            if reply.lease:
                self._matched(asked, reply)
                self._index(peer, asked.digests[: reply.chunks * WIDTH])
        elif isinstance(reply, m.Granted) and isinstance(asked, m.Reserve):
            self._granted(asked, reply)
            for item in asked.items:
                self._index(peer, item.digests)
        elif isinstance(reply, m.Indexed) and reply.chunks and self.segments is not None:
            self.segments.indexed = True
        elif isinstance(reply, m.Segments) and isinstance(asked, m.FindSegments):
            assert self.segments is not None, "it searched nothing"
            if (found := self.segments.check(asked, reply)) is not None:
                peer.ask(found)
        elif isinstance(reply, m.Registered):
            peer.since = min(peer.since, self.world.now)  # of several replies the first
            if process is self.scheduler:
                self.complete = bool(reply.namespace)
        elif isinstance(reply, m.Error) and asked is not None:
            if reply.code in ("bad_value", "bad_rank", "bad_message"):
                raise BrokenLawError(f"{self.name} sent {asked} and got {reply}")
            full = isinstance(asked, m.Register) and reply.code == "limit"
            if full or reply.code in ("rank_taken", "contradiction"):
                self.die(process)

    def _index(self, peer: ClientConnection, digests: bytes) -> None:
        if self.segments is not None and self.segments.is_prompt(digests):
            peer.ask(self.segments.index(digests))

    def _matched(self, asked: m.Lookup, reply: m.Matched) -> None:
        ranks = (0,) if asked.readers is None else asked.readers
        self.held.append(
            Held(
                writes=False,
                id=reply.lease,
                issued=reply.deadline_s - self.world.timing.lease_s,
                deadline=reply.deadline_s,
                ranks=ranks,
                rows=self._rows(reply.slots, range(self.model.groups)),
                memory=self.world.memory,
                expect=self.world.expected(reply.lease),
            )
        )

    def _granted(self, asked: m.Reserve, reply: m.Granted) -> None:
        for item, grant in zip(asked.items, reply.grants, strict=True):
            if grant.reservation:
                groups = [g for g in range(self.model.groups) if item.groups >> g & 1]
                self.held.append(
                    Held(
                        writes=True,
                        id=grant.reservation,
                        issued=reply.deadline_s - self.world.timing.reserve_s,
                        deadline=reply.deadline_s,
                        ranks=self.model.world.writers,
                        rows=self._rows(grant.slots, groups),
                        memory=self.world.memory,
                    )
                )

    def _rows(self, slots: tuple[Slots, ...], groups: list[int] | range) -> list[Place]:
        """The place of every row, group by group."""
        by_group = zip(slots, groups, strict=True)
        return [place for s, g in by_group for place in list_places(s, self.model.shard_bytes(g))]

    # ------------------------------------------------------------ the scheduler

    def schedule(self) -> None:
        """One action of the scheduler."""
        rng, peer = self.world.rng, self.scheduler.peer
        if peer is None:
            self.connect(self.scheduler)
            return
        if self.trainer is not None and self.trainer.random() < 0.03:
            self.generations += 1
            self.generation = f"{self.name} {self.generations}".encode()
            peer.ask(self._register(SCHEDULER))
            return
        if self.segments is not None and self.complete and self.segments.wants():
            peer.ask(self.segments.search())
            return
        if (question := self.world.sessions.ask(self.world.quotas.tenant())) is not None:
            peer.ask(question)
            return
        what = rng.random()
        if what < 0.6 and self.held:
            self._settle(peer, rng.choice(self.held))
        elif not self.complete and what < 0.9:
            if len(peer.asked) < 2:
                peer.ask(self._register(SCHEDULER))
        elif what < 0.73:
            self._lookup(peer)
        elif what < 0.75:
            self._prefetch(peer)
        elif what < 0.95:
            self._reserve(peer)
        elif what < 0.96:
            peer.ask(m.Clear())
        else:
            looks: list[m.Request] = [m.Ping(), m.Status()]
            peer.ask(rng.choice(looks))

    def _lookup(self, peer: ClientConnection) -> None:
        rng = self.world.rng
        prompt = whole = rng.choice(self.model.prompts)
        if rng.random() < 0.03:
            prompt = whole = prompt + prompt  # repeated keys, which no real prompt has
        if self.model.chunk_blocks and rng.random() < 0.5:
            prompt = whole[: rng.randint(0, len(whole))]
        first = rng.choice([0, 0, 0, rng.randint(0, len(prompt))])
        readers: tuple[int, ...] | None = self.model.world.readers
        if rng.random() < 0.3:
            readers = rng.choice([None, (rng.randrange(self.model.ranks),)])
        self.requests += 1
        peer.ask(
            m.Lookup(
                request="r",
                digests=b"".join(prompt),
                width=WIDTH,
                first=first,
                readers=readers,
                spare=int(self.requests % 4 == 0),
                budget_ms=rng.choice([0.0, 0.0, 0.1, 20.0, 2000.0, 20000.0]),
                prefill_tokens_s=rng.choice([0.0, 0.0, 10.0, 1e6]),
                tenant=self.world.quotas.tenant(),
                blocks=self._blocks_after(whole, len(prompt)),
                again=rng.random() < 0.2,
                writing=self.requests % 3 == 0,
                first_blocks=self._blocks_of(whole, first),
                reported=self.requests % 5 == 0,
                **self.world.sessions.context(),
            )
        )

    def _blocks_of(self, prompt: tuple[bytes, ...], chunk: int) -> bytes:
        """The hashes of some first blocks of ``chunk``."""
        most = self.requests % max(1, self.model.chunk_blocks)
        return b"".join(self.model.block_hashes(prompt, chunk)[:most]) if most else b""

    def _blocks_after(self, prompt: tuple[bytes, ...], chunks: int) -> bytes:
        """The hashes of the first blocks of the chunk after so many chunks, or none."""
        count = self.model.chunk_blocks
        if not count or self.world.rng.random() < 0.1:
            return b""
        hashes = self.model.block_hashes(prompt, chunks)
        most = self.world.rng.choice([count - 1, self.world.rng.randint(0, count - 1)])
        return b"".join(hashes[:most])

    def _prefetch(self, peer: ClientConnection) -> None:
        rng = self.world.rng
        prompt = rng.choice(self.model.prompts)
        budget_ms = rng.choice([0.0, 5.0, 1000.0])
        first = rng.choice([0, 0, rng.randint(0, len(prompt))])
        keys = b"".join(prompt) if rng.random() < 0.8 else b""  # without keys it ends the others
        first = first if keys else 0
        peer.ask(m.Prefetch("p", keys, WIDTH, first=first, budget_ms=budget_ms))

    def _reserve(self, peer: ClientConnection) -> None:
        rng, every = self.world.rng, (1 << self.model.groups) - 1
        items = []
        for _ in range(rng.choice([1, 1, 2, 3])):
            prompt = whole = rng.choice(self.model.prompts)
            self.requests += 1
            if self.model.chunk_blocks and rng.random() < 0.5:
                prompt = whole[: rng.randint(0, len(whole))]
            first = rng.choice([0, 0, rng.randint(0, len(prompt))])
            item = m.ReserveItem(
                request="r",
                digests=b"".join(prompt),
                first=first,
                groups=every if rng.random() < 0.8 else rng.randint(1, every),
                tenant=self.world.quotas.tenant(),
                **self.world.sessions.context(),
            )
            if self.model.chunk_blocks and rng.random() < 0.9:
                each = [self.model.block_hashes(whole, c) for c in range(first, len(prompt))]
                item.blocks = b"".join(h for hashes in each for h in hashes)
                item.blocks += self._blocks_after(whole, len(prompt))
            items.append(item)
        peer.ask(m.Reserve(items=items, width=WIDTH))

    def _settle(self, peer: ClientConnection, held: Held) -> None:
        """Hand it over with others, give it back, or do nothing."""
        rng, boot, what = self.world.rng, self.world.memory.boot, self.world.rng.random()
        if what < 0.65:
            chosen = [h for h in self.held if h is held or rng.random() < 0.3]
            leases = tuple(h.id for h in chosen if not h.writes)
            reservations = tuple(h.id for h in chosen if h.writes)
            results = tuple(m.LookupResult("r", 64, 48, failed=n % 3 == 0) for n in leases)
            handed = m.HandedOver(boot=boot, leases=leases, reservations=reservations)
            handed.results, handed.prefill_tokens_s = results, float(len(leases))
            peer.sent.append(handed)
            for one in chosen:
                self.held.remove(one)
                self._dispatch(one)
        elif what < 0.8:
            self.held.remove(held)
            for _ in range(rng.choice([1, 1, 1, 2])):
                if held.writes:
                    peer.sent.append(m.Abort(boot=boot, reservation=held.id))
                else:
                    peer.sent.append(m.Release(boot=boot, lease=held.id))

    def _dispatch(self, held: Held) -> None:
        """The step's metadata reaches every rank that takes part."""
        for rank in held.ranks:
            shard = self.model.shard_of(rank)
            left: list[tuple[int, Tag | None]]
            if held.writes:
                left = [
                    (page, (held.memory.boot, held.id, i, shard))
                    for i, place in enumerate(held.rows)
                    for page in place[shard]
                ]
                self.world.rng.shuffle(left)
            else:
                left = [(p, held.expect[p]) for place in held.rows for p in place[shard]]
            self.workers[rank].jobs.append(Job(held, left))

    # ------------------------------------------------------------ the workers

    def work(self, process: Process) -> None:
        """One action of a worker."""
        if process.peer is None:
            self.connect(process)
        elif self.world.rng.random() < 0.002:
            process.peer.ask(m.Clear())
        elif process.jobs:
            job = self.world.rng.choice(process.jobs)
            held = job.held
            if self._stale(process, job):
                process.jobs.remove(job)
            elif held.writes:
                self._write(process, process.peer, job)
            else:
                self._read(process, process.peer, job)

    def _stale(self, process: Process, job: Job) -> bool:
        """Whether it was issued before this process registered: then nothing protects its slots."""
        since = inf if process.peer is None else process.peer.since
        return job.held.memory is self.world.memory and job.held.issued < since

    def _write(self, process: Process, peer: ClientConnection, job: Job) -> None:
        rng, held = self.world.rng, job.held
        if job.left and rng.random() > 0.2 / max(2, len(held.ranks)):
            for _ in range(rng.choice([1, 4, 100])):
                if job.left:
                    self.world.land(held.memory, *job.left.pop())
            return
        process.jobs.remove(job)
        for _ in range(rng.choice([1, 1, 1, 1, 2])):
            ends: m.Abort | m.Commit
            if job.left:
                ends = m.Abort(boot=held.memory.boot, reservation=held.id, rank=process.rank)
            else:
                ends = m.Commit(boot=held.memory.boot, reservation=held.id, rank=process.rank)
            peer.sent.append(ends)

    def _read(self, process: Process, peer: ClientConnection, job: Job) -> None:
        """Copy out in two steps: what is read before the deadline must be right (law 5)."""
        rng, held, now = self.world.rng, job.held, self.world.now
        if now < held.deadline:
            for page, tag in job.left:
                seen = held.memory.pages.get(page)
                if seen != tag:
                    raise BrokenLawError(f"lease {held.id} read {seen} on page {page}, not {tag}")
        if not job.looked:
            job.looked = True
            return
        self.reads += 1
        self.late_reads += now >= held.deadline
        process.jobs.remove(job)
        for _ in range(rng.choice([1, 1, 1, 2])):
            peer.sent.append(m.Release(boot=held.memory.boot, lease=held.id, rank=process.rank))
