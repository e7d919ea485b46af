"""The verification of copies: after a copy, a sample of its rows is read back from the engine's
pages by another way (``transfer/pages.py``), and compared with L1.

Laws of this file:

- Of each kind of copy and each layer group, the first ``FIRST`` rows are verified. After that, one
  in so many jobs is (``setup.Verification``). That takes two to three times as long as copying a
  row.
- A store is verified before its commit, a load before the engine may use its blocks.
- A difference counts only if the lease or the reservation held until the comparison had ended
  (law 5). Otherwise the slot may have had other bytes, and the job is late.
- After a difference every job of this rank fails.
- If reading fails, for example because a device has no memory left, nothing is proven. The row
  counts as not verified, and the job as done.

The pages are read without waiting for the engine's own work. Nothing writes to them at that time,
for the reason that lets a mover copy them beside later forward passes:

- The blocks of a load belong to a request that the engine has not begun to compute. It does so
  after the load was reported. Blocks that a load skips or drops are not compared.
- The blocks of a store are held until all ranks have reported it, also if their request ends, is
  preempted, or slides a window past them. Stored are blocks with a hash. All their tokens are
  known, so the engine does not write to them again. This is true of a tail, which has whole blocks
  only, and of a state, because the engine continues it in another block.
- Blend moves K in the blocks of a load after the load was reported.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Final

import numpy as np

from kvass.engine.boundary import Boundary
from kvass.engine.memory import KVMemory
from kvass.engine.setup import Verification
from kvass.layout.copy_plan import CopyPlan, RowCopy
from kvass.layout.describe import GroupPlanes
from kvass.transfer.base import Job, Kind, Outcome, U8Array
from kvass.transfer.pages import KVPages

FIRST: Final = 16
"""How many rows of each kind and group are verified first."""
MOST_TRIES: Final = 4 * FIRST
"""How often that is tried, if rows cannot be read."""
EVERY_ON_DEVICE: Final = 10_000
"""After them, one in so many jobs is verified if the pages are on a device. On a CPU none is."""
MOST_NAME: Final = 60
"""How many characters of a layer's name a line has. Joined layers have long names."""


class Verifier:
    """The verifier of one rank. ``check`` is called on the copy thread, all else on the engine's
    thread."""

    def __init__(self, memory: KVMemory, setting: Verification, boundary: Boundary) -> None:
        self._memory, self._setting, self._boundary = memory, setting, boundary
        self._pages = KVPages(memory.regions, memory.owners)
        default = EVERY_ON_DEVICE if memory.gpu else 0
        self._every = default if setting.every is None else setting.every
        self._jobs: Counter[str] = Counter()
        self._rows: Counter[tuple[str, int]] = Counter()
        self._tries: Counter[tuple[str, int]] = Counter()
        self._equal_loads = 0
        self._counted: deque[str] = deque()
        self.difference = ""
        """The first difference, one line; empty if there was none."""

    def take_counts(self) -> Counter[str]:
        """The counters of ``traffic.MEANINGS`` since the last call."""
        counts: Counter[str] = Counter()
        while self._counted:
            counts[self._counted.popleft()] += 1
        return counts

    def loads_verified(self, planes: Iterable[GroupPlanes]) -> bool:
        """Whether the first loads of each of these groups were verified, or it was tried in vain.
        A later one is verified only by chance."""
        return not any(self._is_first("load", one.group) for one in planes if one.planes)

    # ------------------------------------------------------------ the copy thread

    def check(self, job: Job, holds: Callable[[], bool]) -> tuple[Outcome, str]:
        """The outcome of ``job``, all of whose bytes were copied. ``holds``: whether this rank has
        had the same connection since the job's slots were given."""
        if self.difference:
            return "failed", "an earlier copy was wrong"
        due = self._due(job)
        for plan in due:
            key = job.kind, plan.planes.group
            row = plan.rows[self._tries[key] % len(plan.rows)]
            self._tries[key] += 1
            found = self._boundary.run(None, self._compare, job, plan, row)
            if found and (time.monotonic() >= job.deadline_s or not holds()):
                return "late", ""
            if found is None:
                self._boundary.count(
                    "not_verified", "a copy could not be verified: it counts as done"
                )
            self._rows[key] += found is not None
            self._counted.append(_counter(found))
            if found:
                self.difference = found
                return "differs", found
            self._equal_loads += found is not None and job.kind == "load" and plan is due[-1]
        return "done", ""

    def _due(self, job: Job) -> list[CopyPlan]:
        self._jobs[job.kind] += 1
        every = self._every
        if self._equal_loads < self._setting.trial_loads:
            every = min(every or self._setting.trial_every, self._setting.trial_every)
        sampled = every > 0 and self._jobs[job.kind] % every == 0
        return [
            plan
            for plan in job.plans
            if plan.rows and (sampled or self._is_first(job.kind, plan.planes.group))
        ]

    def _is_first(self, kind: Kind, group: int) -> bool:
        """Whether fewer than ``FIRST`` rows were verified, and it is not in vain to try."""
        return self._rows[kind, group] < FIRST and self._tries[kind, group] < MOST_TRIES

    def _compare(self, job: Job, plan: CopyPlan, row: RowCopy) -> str:
        """The first byte at which ``row`` in L1 and the engine's pages differ, as one line. Empty:
        none."""
        planes, count = plan.planes, len(row.blocks)
        for number, (plane, at) in enumerate(
            zip(planes.planes, planes.slot_offsets(), strict=True)
        ):
            begin = row.slot + at + row.first * plane.run
            stored = job.arena[begin : begin + count * plane.run].reshape(count, plane.run)
            for first, pages in self._pages.read(plane, row.blocks):
                here = stored[first : first + len(pages)]
                if not _equal(here, pages):
                    page, byte = (int(i[0]) for i in np.nonzero(here != pages))
                    where = at + (row.first + first + page) * plane.run + byte
                    values = int(here[page, byte]), int(pages[page, byte])
                    return self._line(job, planes, number, where, values)
        return ""

    def _line(
        self, job: Job, planes: GroupPlanes, plane: int, at: int, values: tuple[int, int]
    ) -> str:
        """``at``: the first wrong byte of the slot, in plane number ``plane``. ``values``: of that
        byte, in L1 and in the engine's page."""
        counted = Counter(one.run for one in planes.planes).items()
        runs = ", ".join(f"{count} of {run} bytes" for run, count in counted)
        layout, layer = self._memory.layout.groups, ""
        kind = ""
        if planes.group < len(layout):
            group = layout[planes.group]
            kind = f"{group.kind}, blocks of {group.block_tokens} tokens, "
            layer = f", {group.layers[plane][:MOST_NAME]}"
        stores = job.kind == "store"
        found, expected = values if stores else values[::-1]
        return (
            f"a {job.kind} in layer group {planes.group} ({kind}runs per block: {runs}, "
            f"{planes.chunk_blocks} blocks per row) is wrong from byte {at} of its slot on: "
            f"{'L1' if stores else 'the block'} has {found:#04x}, not {expected:#04x} "
            f"(plane {plane}{layer})"
        )


def _equal(first: U8Array, second: U8Array) -> bool:
    """Whether two arrays of pages are equal. numpy compares eight bytes as fast as one."""
    if first.shape[1] % 8 == 0:
        return np.array_equal(first.view(np.uint64), second.view(np.uint64))
    return np.array_equal(first, second)


def _counter(found: str | None) -> str:
    """The counter of a row with this difference. None: it could not be compared."""
    if found is None:
        return "not_verified"
    return "verify_failed" if found else "verified"
