"""The worker's half of shadow mode: it loads rows into scratch memory and compares them with the KV
that the engine computed itself.

Laws of this file:

- Nothing here writes to the engine's KV pages.
- A check that was begun ends exactly once (``ended``), also if it fails.
- The lease of a check is released right after its last row was read. If a device is lost, which
  may still read, neither the lease nor any memory is given back.
- The memory is bounded: at most ``BATCH_BYTES`` (or one row) in each of the three buffers.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvass.client.worker import ArenaLease
from kvass.engine.boundary import Boundary
from kvass.engine.memory import KVMemory, MakeMover, Values, scratch_like
from kvass.engine.step_work import Compared, GroupCompared, ShadowCheck
from kvass.layout.copy_plan import CopyPlan, RowCopy
from kvass.layout.describe import GroupPlanes, Plane
from kvass.transfer.base import Done, Job, Mover, U8Array

BATCH_BYTES: Final = 16 << 20
"""How many bytes are loaded and compared at a time."""
POLL_S: Final = 1.0
"""How often a waiting comparer looks whether it was closed."""

MOST: Final = 1e12
"""The largest difference that is reported."""
WRONG: Final = 0.25
"""A row is wrong if a value differs by more than this part of its own magnitude and the root mean
square of the values beside it, together. Noise of ``bfloat16`` over 30 layers reaches 0.11."""

_FLOATS: Final = ("float64", "float32", "float16", "bfloat16")

_lost: Final[list[object]] = []
"""Comparers whose memory a failed device may still access. They are kept until the process ends."""


class NotLoadedError(Exception):
    """The error for rows that could not be loaded: the lease lapsed, or a copy failed."""


@dataclass(frozen=True)
class _Begun:
    """A check with its copy plans, one for each group that is compared. ``end`` is called on the
    comparer's thread when no row is read any more."""

    check: ShadowCheck
    plans: tuple[CopyPlan, ...]
    arena: ArenaLease
    end: Callable[[], None]


class Comparer:
    """The comparer of one rank. ``begin``, ``ended`` and ``close`` are called from the engine's
    thread."""

    def __init__(
        self, memory: KVMemory, rank: int, boundary: Boundary, make_mover: MakeMover
    ) -> None:
        self._memory, self._rank, self._boundary = memory, rank, boundary
        self._on_gpu = bool(memory.gpu)
        rows = {p.group: max(1, BATCH_BYTES // p.shard_bytes) for p in memory.planes if p.planes}
        self._rows = rows
        self._scratch_planes = {
            p.group: scratch_planes(p, rows[p.group]) for p in memory.planes if p.planes
        }
        sizes = [max(q.end(p.blocks) for q in p.planes) for p in self._scratch_planes.values()]
        scratch = scratch_like(memory, tuple(self._scratch_planes.values()), max(sizes, default=1))
        # The engine's own mover pins the arena.
        self._scratch, self._own = make_mover(scratch, False), make_mover(memory, False)
        most = max((n * p.shard_bytes for p, n in self._sizes(memory)), default=1)
        self._computed_rows, self._loaded_rows = np.zeros(most, np.uint8), np.zeros(most, np.uint8)
        self._begun: queue.SimpleQueue[_Begun | None] = queue.SimpleQueue()
        self._ended: deque[tuple[ShadowCheck, Compared]] = deque()
        self._news = threading.Event()
        """Set when a check has ended that ``ended`` has not returned."""
        self._open = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    def _sizes(self, memory: KVMemory) -> Iterator[tuple[GroupPlanes, int]]:
        return ((p, self._rows[p.group]) for p in memory.planes if p.planes)

    # ------------------------------------------------------------ the engine's thread

    def begin(
        self,
        check: ShadowCheck,
        plans: tuple[CopyPlan, ...],
        arena: ArenaLease,
        after: Mover,
        end: Callable[[], None],
    ) -> None:
        """Begin ``check`` after the forward pass. ``plans``: those of its load. ``after``: the
        mover of the engine's stores, which knows when the forward pass of a GPU has ended.
        ``end``: releases the lease."""
        begun = _Begun(check, plans, arena, end)
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="kvass-compare", daemon=True)
            thread.start()
            self._thread = thread
        if not self._on_gpu or not plans:
            self._begun.put(begun)
        else:
            first = _part(plans[0], 0, 1)
            row = np.zeros(first.end, np.uint8)
            after.submit(
                Job("store", (first,), row, name=check, on_done=lambda _: self._begun.put(begun))
            )
        self._open += 1

    def ended(self) -> list[tuple[ShadowCheck, Compared]]:
        """The checks that ended since the last call. Never waits."""
        self._news.clear()
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
        self._open -= len(ended)
        return ended

    @property
    def busy(self) -> bool:
        """Whether a check was begun that ``ended`` has not returned."""
        return self._open > 0

    def wait(self, timeout_s: float) -> None:
        """Wait until a check has ended, if one was begun."""
        if self._open:
            self._news.wait(timeout_s)

    def close(self) -> None:
        """End the thread and the copies. Checks that have not ended fail."""
        self._closed = True
        self._begun.put(None)
        if self._thread is not None:
            self._thread.join()
        self._scratch.close()
        self._own.close()

    # ------------------------------------------------------------ the comparer's thread

    def _run(self) -> None:
        while (begun := self._begun.get()) is not None:
            result = self._boundary.run(None, self._compare, begun)
            if result is None:
                result = self._result(begun.check, error="comparing failed")
            if not any(kept is self for kept in _lost):
                begun.arena.close()
                self._boundary.run(None, begun.end)
            self._ended.append((begun.check, result))
            self._news.set()

    def _result(self, check: ShadowCheck, error: str = "") -> Compared:
        return Compared(check.load.request, self._rank, error=error)

    def _compare(self, begun: _Begun) -> Compared:
        check = begun.check
        found: dict[int, GroupCompared] = {}
        load_bytes, load_s = 0, 0.0
        try:
            for plan in begun.plans:
                group = plan.planes.group
                first = check.chunks - len(plan.rows)
                for begin in range(0, len(plan.rows), self._rows[group]):
                    part = _part(plan, begin, begin + self._rows[group])
                    load_s += self._load(begun, part, plan.rows[begin:])
                    load_bytes += part.bytes
                    known = found.get(group, GroupCompared())
                    found[group] = self._add(known, part, first + begin)
        except NotLoadedError as error:
            return self._result(check, str(error))
        nothing = GroupCompared()  # of a group without layers on this rank
        groups = tuple(
            found.get(planes.group) if planes.planes else nothing for planes in self._memory.planes
        )
        return replace(self._result(check), load_bytes=load_bytes, load_s=load_s, groups=groups)

    def _load(self, begun: _Begun, part: CopyPlan, rows: Sequence[RowCopy]) -> float:
        """Load the first of ``rows`` into scratch memory. Copy them and the computed rows into the
        buffers, where ``part`` has their places. Returns how long the load took."""
        if self._closed:
            raise NotLoadedError("closed")
        arena, planes = begun.arena, self._scratch_planes[part.planes.group]
        scratch = _in_scratch(part, planes)
        pairs = list(zip(scratch.rows, rows, strict=False))
        source = replace(
            scratch,
            rows=tuple(replace(row, slot=there.slot) for row, there in pairs),
            end=max(there.slot for _, there in pairs) + planes.shard_bytes,
        )
        deadline_s, populated = begun.check.load.deadline_s, arena.populated
        took_s = self._carry_out(
            self._scratch, Job("load", (source,), arena.buffer, deadline_s, populated=populated)
        )
        self._store(self._scratch, scratch, self._loaded_rows)
        self._store(self._own, part, self._computed_rows)
        return took_s

    def _store(self, mover: Mover, plan: CopyPlan, buffer: U8Array) -> None:
        self._carry_out(mover, Job("store", (plan,), buffer, populated=0))

    def _carry_out(self, mover: Mover, job: Job) -> float:
        """Carry out one job. Returns how long it took. Raises ``NotLoadedError``."""
        mover.submit(job)
        while not mover.drain(POLL_S):
            if self._closed:
                mover.close()  # all jobs have ended when it returns
        (done,) = mover.poll()
        if done.outcome == "lost":
            _lost.append(self)
        if not done.ok or self._closed:
            raise NotLoadedError(_why(done))
        return done.seconds

    def _add(self, known: GroupCompared, part: CopyPlan, chunk: int) -> GroupCompared:
        """``known`` with the rows of ``part``, which are in the buffers. ``chunk``: the chunk of
        the first of them."""
        group = part.planes.group
        values = self._memory.values[group] if self._memory.values else ()
        differing, compared, wrong = known.differing_rows, known.bytes, known.wrong_rows
        worst = known.largest_difference, known.at_value, known.chunk
        worst_wrong = known.worst_wrong
        for number, row in enumerate(part.rows):
            differs, is_wrong, at = False, False, chunk + number
            for loaded, computed, dtype in _values_of_row(
                part.planes, row, values, self._loaded_rows, self._computed_rows
            ):
                compared += loaded.nbytes
                if not np.array_equal(loaded, computed):
                    differs = True
                    found = difference(loaded, computed, dtype)
                    worst = max(worst, (*found.largest, at), key=lambda each: each[0])
                    if found.wrong is not None:
                        is_wrong = True
                        worst_wrong = max(worst_wrong, (*found.wrong, at), key=lambda each: each[0])
            differing += differs
            wrong += is_wrong
        rows = known.rows + len(part.rows)
        return GroupCompared(rows, compared, differing, *worst, wrong, worst_wrong)


def scratch_planes(planes: GroupPlanes, rows: int) -> GroupPlanes:
    """The planes of scratch memory for ``rows`` rows of a group: each plane's pages adjacent, one
    plane after the other. Block ids begin at 1, as in the engine's memory."""
    blocks = 1 + rows * planes.chunk_blocks
    made, base = [], 0
    for plane in planes.planes:
        made.append(Plane(base, plane.run, plane.run))
        base += blocks * plane.run
    return GroupPlanes(planes.group, tuple(made), blocks, planes.chunk_blocks)


def _part(plan: CopyPlan, begin: int, end: int) -> CopyPlan:
    """Rows ``[begin, end)`` of ``plan``, for a buffer in which they are adjacent."""
    rows = plan.rows[begin:end]
    size = plan.planes.shard_bytes
    return replace(
        plan,
        rows=tuple(replace(row, slot=i * size) for i, row in enumerate(rows)),
        bytes=sum(len(row.blocks) for row in rows) * plan.planes.block_bytes,
        end=len(rows) * size,
    )


def _in_scratch(part: CopyPlan, planes: GroupPlanes) -> CopyPlan:
    """``part`` with the blocks of scratch memory in the place of the engine's."""

    def row_in_scratch(number: int, row: RowCopy) -> RowCopy:
        first = 1 + number * planes.chunk_blocks + row.first
        return replace(row, blocks=np.arange(first, first + len(row.blocks), dtype=np.int64))

    rows = tuple(row_in_scratch(i, row) for i, row in enumerate(part.rows))
    return replace(part, planes=planes, rows=rows, distinct=True)


def _values_of_row(
    planes: GroupPlanes,
    row: RowCopy,
    values: tuple[tuple[Values, ...], ...],
    loaded: U8Array,
    computed: U8Array,
) -> Iterator[tuple[U8Array, U8Array, str]]:
    """The values of a row in both buffers, uint8 of shape ``(pages, bytes)``, and their dtype."""
    count = len(row.blocks)
    for number, (plane, at) in enumerate(zip(planes.planes, planes.slot_offsets(), strict=True)):
        begin = row.slot + at + row.first * plane.run
        pages = [
            each[begin : begin + count * plane.run].reshape(count, plane.run)
            for each in (loaded, computed)
        ]
        known = values[number] if values else ()
        for dtype, first, size in known or (("uint8", 0, plane.run),):
            yield pages[0][:, first : first + size], pages[1][:, first : first + size], dtype


class Difference(NamedTuple):
    """How values differ. ``largest``: the largest absolute difference, and the magnitude of the
    computed value there. ``wrong``: the same of the largest one that is as large as the values
    themselves (``WRONG``); None: there is none."""

    largest: tuple[float, float]
    wrong: tuple[float, float] | None


def difference(loaded: U8Array, computed: U8Array, dtype: str) -> Difference:
    """How values differ. The arrays are the bytes of values of ``dtype`` (a torch name).

    Values of other dtypes than ``float64``, ``float32``, ``float16`` and ``bfloat16`` count as
    bytes, and are never ``wrong``: a byte does not say how large a value is. All numbers are
    ``MOST`` at most, also where one value is no number and the other one is."""
    first, second = _as_numbers(loaded, dtype), _as_numbers(computed, dtype)
    with np.errstate(all="ignore"):
        differs = np.abs(first - second)
    differs[(first == second) | (np.isnan(first) & np.isnan(second))] = 0.0
    differs = np.nan_to_num(differs, nan=MOST, posinf=MOST).clip(max=MOST)
    sizes = np.nan_to_num(np.abs(second), nan=MOST, posinf=MOST).clip(max=MOST)
    largest = _largest(differs, sizes)
    if dtype not in _FLOATS:
        return Difference(largest, None)
    usual = sizes[sizes < MOST]
    scale = np.sqrt(np.mean(usual * usual)) if len(usual) else 0.0
    differs[differs <= WRONG * (sizes + scale)] = 0.0
    return Difference(largest, _largest(differs, sizes) if differs.any() else None)


def _largest(
    differs: npt.NDArray[np.float64], sizes: npt.NDArray[np.float64]
) -> tuple[float, float]:
    at = int(differs.argmax())
    return float(differs.flat[at]), float(sizes.flat[at])


def _as_numbers(raw: U8Array, dtype: str) -> npt.NDArray[np.float64]:
    whole = np.ascontiguousarray(raw)
    match dtype:
        case "float64" | "float32" | "float16":
            return whole.view(dtype).astype(np.float64)
        case "bfloat16":  # the upper half of a float32
            wide = whole.view(np.uint16).astype(np.uint32) << 16
            return wide.view(np.float32).astype(np.float64)
    return whole.astype(np.float64)


def _why(done: Done) -> str:
    return done.error or f"the copy ended {done.outcome}"
