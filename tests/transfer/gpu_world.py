"""A seeded engine over the fake GPU: it reuses blocks and slots the moment it may.

Law of this file: it does only what the duties in ``transfer/base.py`` allow, and believes a mover's
word: what is settled is overwritten at once. So every wrong byte is the mover's.

The engine's stream runs late. What its kernels find is compared with what they would find if
everything happened in the order it was asked for (``Engine.model``).
"""

from __future__ import annotations

import logging
import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvass.layout.copy_plan import CopyPlan, plan_copy
from kvass.layout.describe import GroupPlanes, Plane
from kvass.transfer.base import Done, Job, Kind, U8Array
from kvass.transfer.batch import Stage, Staging
from kvass.types import PAGE, I64Array
from tests.support.gpu.fake_gpu import KERNEL_TABLES, FakeGpu
from tests.support.gpu.stepped_mover import SteppedMover

TROUBLES = (
    *("none", "none", "copy", "register", "context", "order", "open_stream", "wait"),
    *("mark", "done", "idle", "raises"),
)


class WrongError(AssertionError):
    """A law was broken."""


class Clock:
    """Stands still; raises for who waits for ever."""

    now = 1000.0
    patience = 6_000

    def __call__(self) -> float:
        self.patience -= 1
        if self.patience < 0:
            raise WrongError("jobs that never end")
        return self.now


@dataclass(eq=False)
class Boot:
    """The slots of an arena: ``ready`` ones have rows to load, ``free`` ones can be stored to.
    ``populated`` bytes of it have memory, and ``told`` of them the mover may know of."""

    free: list[int]
    ready: list[int]
    populated: int
    told: int = 0


@dataclass(eq=False)
class Row:
    """A submitted job, and what it must have moved once it is done."""

    plan: CopyPlan
    slot: int
    blocks: I64Array
    boot: Boot
    expect: dict[tuple[int, int], bytes]
    """By plane and place in the row: the page's bytes."""


class World:
    """One seed. ``run`` raises WrongError, or all was well."""

    def __init__(self, seed: int) -> None:
        self.rng, self.water = random.Random(seed), random.Random(seed)
        self.fake = FakeGpu(seed, eager=self.rng.choice([1, 2, 10]), unsigned=seed % 5 == 0)
        self.clock = Clock()
        self.trouble = self.rng.choice(TROUBLES)
        self.planes = self._planes()
        size = max(p.end(self.planes.blocks) for p in self.planes.planes)
        region, self.memory = self.fake.allocate(size + 64)
        self.model = self.memory.copy()
        self.free = list(range(1, self.planes.blocks))
        self.used: list[list[int]] = []
        self.flying: dict[int, Row] = {}
        self.ended: list[int] = []
        self.told: list[int] = []
        self.outcomes: dict[int, str] = {}
        self.old: list[weakref.ref[U8Array]] = []
        self.boot = self._new_boot()
        self._plan_trouble()
        self.fake.few = self.water.choice([1, 16])
        self.fake.batch_runs = self.water.choice([1, 2, 5, 20, 4096, 4096])
        self.mover = SteppedMover(
            self.fake,
            [region],
            [self.planes],
            clock=self.clock,
            window=self.rng.choice([1, 2, 3]) * PAGE,
            batch_bytes=self.rng.choice([1, 200, 1 << 20]),
            flying_bytes=self.rng.choice([1, 600, 3000, 1 << 30]),
            kernel_below={"store": 0, "load": self.rng.choice([0, 200, 1 << 20])},
            stagings=self._stagings(random.Random(~seed)),
        )

    # ------------------------------------------------------------ making

    def _stagings(self, rng: random.Random) -> dict[Kind, Staging]:
        """Of each kind: stages of which some are as long as two pages, or none."""
        self.fake.fewest_staged, found = self.fake.few, dict[Kind, Staging]()
        kinds: list[Kind] = ["store", "load"]
        for kind in kinds if self.fake.tables is not None else []:
            size, number = rng.choice([64, 2048, 10_000, 1 << 16]), rng.choice([0, 1, 2, 2, 3])
            stages = [self.fake.open_stage(size) for _ in range(number)]
            if stages:
                below = rng.choice([50, 600, 1 << 20])
                found[kind] = Staging(below, tuple(x for x in stages if isinstance(x, Stage)))
        return found

    def _planes(self) -> GroupPlanes:
        rng, blocks, chunk = self.rng, self.rng.randint(8, 20), self.rng.randint(1, 3)
        runs = [rng.choice([8, 24, 100, 1024, 5000]) for _ in range(rng.randint(1, 3))]
        planes, at = [], 8 * rng.randint(0, 3)
        if rng.random() < 0.5:  # blocks outermost
            for run in runs:
                planes.append(Plane(at, sum(runs), run))
                at += run
        else:
            for run in runs:
                planes.append(Plane(at, run + rng.choice([0, 8]), run))
                at = planes[-1].end(blocks) + 4
        return GroupPlanes(0, tuple(planes), blocks, chunk)

    def _new_boot(self) -> Boot:
        slots = self.rng.randint(3, 6)
        arena = self.fake.map((slots * self.planes.shard_bytes // PAGE + 1) * PAGE)
        self.old.append(weakref.ref(arena))
        ready = list(range(slots // 2))
        for slot in ready:
            at = slot * self.planes.shard_bytes
            row = arena[at : at + self.planes.shard_bytes]
            row[:] = np.frombuffer(self.rng.randbytes(len(row)), np.uint8)
        self.arena = arena  # the only one who keeps it, but for jobs
        populated = self.water.choice([0, arena.nbytes // 2, *[arena.nbytes] * 6])
        return Boot(list(range(slots // 2, slots)), ready, populated)

    def _plan_trouble(self) -> None:
        calls = ["copy", "register", "order", "open_stream", "wait", "mark", "done", "idle"]
        if self.trouble in calls:
            many = self.rng.randint(1, 4)
            first = 0 if self.trouble == "open_stream" else 12
            self.fake.plans.fail[self.trouble] = {self.rng.randint(0, first) for _ in range(many)}
        if self.trouble == "raises":
            call = self.rng.choice([one for one in calls if one != "order"])
            self.fake.plans.fail[f"{call} raises"] = {self.rng.randint(0, 12)}
        if self.trouble == "idle":  # is asked only if an event says nothing
            self.fake.plans.fail["mark"] = {self.rng.randint(0, 6) for _ in range(3)}

    def _pages(self, blocks: list[int] | I64Array) -> list[slice]:
        return [
            slice(p.base + int(b) * p.block_stride, p.base + int(b) * p.block_stride + p.run)
            for b in blocks
            for p in self.planes.planes
        ]

    def write(self, blocks: list[int], fill: Callable[[int], bytes]) -> None:
        """Queue a kernel that writes all pages of ``blocks``."""
        pages = self._pages(blocks)
        work = [(page, np.frombuffer(fill(page.stop - page.start), np.uint8)) for page in pages]
        for page, data in work:
            self.model[page] = data

        def kernel() -> None:
            for page, data in work:
                self.memory[page] = data

        self.fake.queue(kernel)

    def read(self, blocks: list[int]) -> None:
        """Queue a kernel that reads all pages of ``blocks``, and must find what is in order."""
        expect = [(page, self.model[page].copy()) for page in self._pages(blocks)]

        def kernel() -> None:
            for page, data in expect:
                if not np.array_equal(self.memory[page], data):
                    self.fake.violations.append("a kernel read what was not there in its order")

        self.fake.queue(kernel)

    def forward(self) -> None:
        """A step that computes a chunk, and stores it: the drafter comes after the target."""
        chunk = self.planes.chunk_blocks
        if len(self.free) < chunk:
            return
        blocks = self._allocate(chunk)
        self.write(blocks, self.rng.randbytes)
        self.write(blocks[-1:], self.rng.randbytes)
        if self.boot.free and self.rng.random() < 0.8:
            slot = self.boot.free.pop(self.rng.randrange(len(self.boot.free)))
            pages = [self.model[page].tobytes() for page in self._pages(blocks)]
            self._submit("store", slot, blocks, pages)
        else:
            self.used.append(blocks)

    def load(self) -> None:
        """A request waits for a row in new blocks, which queued work may read or zero still."""
        chunk = self.planes.chunk_blocks
        if len(self.free) < chunk or not self.boot.ready:
            return
        slot = self.boot.ready.pop(self.rng.randrange(len(self.boot.ready)))
        self._submit("load", slot, self._allocate(chunk), [])

    def _allocate(self, count: int) -> list[int]:
        picked = [self.free.pop(self.rng.randrange(len(self.free))) for _ in range(count)]
        if self.rng.random() < 0.7:
            self.write(picked, bytes)  # zeroed
        return picked

    def finish(self) -> None:
        """A request ends: its last step is queued still while its blocks are free again."""
        if self.used:
            blocks = self.used.pop(self.rng.randrange(len(self.used)))
            self.read(blocks)
            self.free += blocks

    def restart(self) -> None:
        """Another life of the daemon: a new arena, and nobody keeps the old one but jobs."""
        self.boot = self._new_boot()

    def _submit(self, kind: Kind, slot: int, blocks: list[int], pages: list[bytes]) -> None:
        chunk, boot, arena = self.planes.chunk_blocks, self.boot, self.arena
        skip = self.rng.randrange(chunk) if kind == "load" else 0
        offset = slot * self.planes.shard_bytes
        drop = self.rng.randrange(chunk - skip) if kind == "load" else 0
        plan = plan_copy(self.planes, [blocks], [offset], skip=skip, drop=drop)
        if kind == "load":
            self.free += blocks[:skip] + blocks[chunk - drop :]
            blocks = blocks[skip : chunk - drop]
        row = Row(plan, slot, np.array(blocks), boot, {})
        count = len(self.planes.planes)
        for i, inside in enumerate(self.planes.slot_offsets()):
            run = self.planes.planes[i].run
            for n in range(len(blocks)):
                at = offset + inside + (skip + n) * run
                data = arena[at : at + run].tobytes()
                row.expect[i, n] = pages[n * count + i] if kind == "store" else data
        number = len(self.flying) + len(self.ended)
        deadline = self.clock.now + self.rng.choice([0.0, 0.5, 2.0, 1e9, 1e9])
        self.flying[number] = row
        job = Job(kind, (plan,), arena, deadline, number, self._on_done, boot.populated)
        with self.fake.engine_thread():
            self.mover.submit(job)
        boot.told = max(boot.told, boot.populated)

    # ------------------------------------------------------------ what is settled

    def _on_done(self, done: Done) -> None:
        number = done.job.name
        assert isinstance(number, int)
        try:
            if number in self.outcomes:
                raise WrongError("settled twice")
            self.outcomes[number] = done.outcome
            self._judge(number, done)
        except (WrongError, ValueError, IndexError) as wrong:  # a mover would only log it
            self.fake.violations.append(str(wrong))

    def _judge(self, number: int, done: Done) -> None:
        row = self.flying.pop(number)
        self.ended.append(number)
        if done.outcome == "lost":
            if not self.fake.dead and self.trouble != "idle":
                raise WrongError("lost, but the device lives")
            return
        self._check_idle(row, done.job.arena)
        if done.outcome == "done":
            if self.clock.now >= done.job.deadline_s:
                raise WrongError("law 5: done after its deadline")
            self._check_bytes(row, done.job.kind, done.job.arena)
        elif done.outcome == "late" and self.clock.now < done.job.deadline_s:
            raise WrongError("late before its deadline")
        elif done.outcome == "failed" and self.trouble == "none":
            raise WrongError(f"failed for nothing: {done.error}")
        elif done.outcome == "failed" and self.trouble == "register":
            raise WrongError(f"memory is not pinned, which is no failed job: {done.error}")
        self._reuse(row, done)

    def _check_idle(self, row: Row, arena: U8Array) -> None:
        at = arena.ctypes.data + row.slot * self.planes.shard_bytes
        busy = self.fake.busy(at, self.planes.shard_bytes)
        base = self.memory.ctypes.data
        for page in self._pages(row.blocks):
            busy = busy or self.fake.busy(base + page.start, page.stop - page.start)
        if busy:
            raise WrongError("law 3: settled while a copy may still run")

    def _check_bytes(self, row: Row, kind: str, arena: U8Array) -> None:
        offsets, (copy,) = self.planes.slot_offsets(), row.plan.rows
        for (i, n), data in row.expect.items():
            plane = self.planes.planes[i]
            at = copy.slot + offsets[i] + (copy.first + n) * plane.run
            block = plane.base + int(row.blocks[n]) * plane.block_stride
            got = self.memory[block : block + plane.run]
            if kind == "store":
                got = arena[at : at + plane.run]
            if got.tobytes() != data:
                raise WrongError(f"a {kind} is done, and the bytes are wrong")

    def _reuse(self, row: Row, done: Done) -> None:
        """Blocks and slot are the world's again."""
        blocks, row_bytes = row.blocks.tolist(), self.planes.shard_bytes
        at = row.slot * row_bytes
        if done.job.kind == "store":
            if done.ok:
                row.boot.ready.append(row.slot)
            else:
                row.boot.free.append(row.slot)
            self.used.append(blocks)
            return
        if done.ok:
            for page in self._pages(blocks):
                self.model[page] = self.memory[page]
            self.read(blocks)
            self.used.append(blocks)
        else:
            self.write(blocks, bytes)  # computed anew
            self.used.append(blocks)
        if self.rng.random() < 0.5:  # evicted, and written by another engine
            done.job.arena[at : at + row_bytes] = self.rng.randrange(256)
            row.boot.free.append(row.slot)
        else:
            row.boot.ready.append(row.slot)

    # ------------------------------------------------------------ running

    def run(self, moves: int = 120) -> None:
        """A history, its end, and what must hold then."""
        dies = self.rng.randrange(moves) if self.trouble == "context" else -1
        weights = {
            self.forward: 4, self.load: 4, self.finish: 3, self._device: 8, self._turn: 8,
            self._poll: 2, self._time: 2, self._populate: 1, self.restart: 0.3,
        }  # fmt: skip
        for n in range(moves):
            if n == dies:
                self.fake.kill()
            (move,) = self.rng.choices(list(weights), list(weights.values()))
            if move in (self._device, self._turn):
                move()
                continue
            with self.fake.engine_thread():  # which lets go of arenas, too
                move()
        if self.rng.random() < 0.7:
            for _ in range(20_000):
                if not self.flying:
                    break
                self._device()
                self._turn()
            if self.flying:
                raise WrongError("jobs that never end")
        self.mover.close()
        self._judge_end()

    def _device(self) -> None:
        for _ in range(self.rng.randint(1, 12)):
            self.fake.step()

    def _turn(self) -> None:
        self.mover._turn()
        if self.fake.dead:  # it keeps what nobody unregisters, of memory that is another's since
            return
        base = self.arena.ctypes.data
        for at, count in self.fake.registered.items():
            if base <= at < base + self.arena.nbytes and at + count > base + self.boot.told:
                raise WrongError("memory was pinned that the daemon has not populated")

    def _populate(self) -> None:
        left = self.arena.nbytes - self.boot.populated
        self.boot.populated += min(left, PAGE * self.water.randint(0, 6))

    def _poll(self) -> None:
        for done in self.mover.poll():
            assert isinstance(done.job.name, int)
            self.told.append(done.job.name)

    def _time(self) -> None:
        self.clock.now += self.rng.choice([0.1, 0.6])

    def _judge_end(self) -> None:
        self._poll()
        fake = self.fake
        if self.flying:
            raise WrongError("closed, and not every job is settled")
        if self.told != self.ended:
            raise WrongError("poll tells otherwise than on_done did")
        lives = not (fake.dead or self.mover._dead)
        if fake.registered and lives:
            raise WrongError("closed, and memory is still registered")
        del self.arena
        fake.run()
        if lives:
            if any(arena() is not None for arena in self.old):
                raise WrongError("an arena is kept alive")
            if fake.mapped:
                raise WrongError("an arena stays mapped")
            # A batch without an event keeps its table.
            free = KERNEL_TABLES if fake.tables is None else len(fake.tables.free)
            if free < KERNEL_TABLES and not self.mover._useless:
                raise WrongError("a kernel's table leaks")
        for batch in fake.copied:
            most = self.mover._lanes[batch.kind].how.bytes
            if batch.way == "pageable" and 4 * int(batch.bytes[:-1].sum()) >= most:
                raise WrongError("a call that may block was given as much as one that does not")
        if fake.violations:
            raise WrongError(fake.violations[0])


def run_seed(seed: int) -> str:
    """What is wrong with a seed; empty if nothing is."""
    logging.disable()  # pytest keeps what is logged, errors with all that their frames hold
    try:
        World(seed).run()
    except WrongError as wrong:
        return f"seed {seed}: {wrong}"
    finally:
        logging.disable(logging.NOTSET)
    return ""
