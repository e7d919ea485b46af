"""What every mover asks of a job before it accepts it.

Law of this file: a job that does not fit is refused with a typed error, before one byte moved.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvass.errors import UsageError
from kvass.layout.copy_plan import CopyPlan
from kvass.layout.describe import GroupPlanes
from kvass.transfer.base import Job, U8Array


def check_job(job: Job, planes: Mapping[int, GroupPlanes]) -> None:
    """Raise UsageError unless ``job`` fits its arena and a mover of ``planes`` (by group)."""
    check_bytes(job.arena, "the arena")
    for plan in job.plans:
        _check_plan(job, plan, planes)


def _check_plan(job: Job, plan: CopyPlan, planes: Mapping[int, GroupPlanes]) -> None:
    if planes.get(plan.planes.group) != plan.planes:
        raise UsageError(f"group {plan.planes.group}: planned for planes this mover has not")
    if plan.end > job.arena.nbytes:
        raise UsageError(
            f"group {plan.planes.group}: a slot ends at byte {plan.end} of an arena of "
            f"{job.arena.nbytes} bytes; is the plan of another boot?"
        )
    if job.kind == "load" and not plan.distinct:
        raise UsageError(f"group {plan.planes.group}: two pages would be loaded into one block")


def check_bytes(memory: U8Array, what: str) -> None:
    """Raise UsageError unless ``memory`` is a flat, writable array of bytes."""
    if memory.dtype != np.uint8 or memory.ndim != 1 or not memory.flags.c_contiguous:
        raise UsageError(f"{what} is {memory.dtype} {memory.shape}; give a flat uint8 array")
    if not memory.flags.writeable:
        raise UsageError(f"{what} is read-only; give a writable array")
