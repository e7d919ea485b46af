"""A job as batches: which way each of its runs goes, and what must be pinned before.

Law of this file: what a batch needs of the arena is registered as late as can be, while what was
given before flies; runs of windows that are not registered go the slow way, and arrive.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from kvass.transfer.base import Job
from kvass.transfer.descriptors import Runs, batches, choose, plan_runs
from kvass.transfer.pins import Pinned
from kvass.transfer.runtime import Batch, Kind, Region, Way
from kvass.types import I64Array


def job_batches(
    job: Job,
    regions: Sequence[Region],
    pinned: Pinned,
    below: Mapping[Kind, int],
    limit: int,
    most: int,
) -> Iterator[Batch]:
    """The batches of ``job``, of some ``limit`` bytes and at most ``most`` runs. ``below`` as
    ``kernel_below`` of ``CudaMover``; ``pinned`` is of the job's arena."""
    window = pinned.window
    for runs in plan_runs(job.plans, regions, window):
        windows = runs.host // window
        pinned_all = pinned.want(np.unique(windows).tolist(), job.populated if below else 0)
        which = None if pinned_all else pinned.are(windows)
        for way, some in choose(runs, job.kind, which, below):
            yield from _cut(job.kind, way, some, some.host + pinned.address, limit, most)


def _cut(
    kind: Kind, way: Way, runs: Runs, host: I64Array, limit: int, most: int
) -> Iterator[Batch]:
    ends = host.view(np.uint64), runs.device.view(np.uint64)
    target, source = ends if kind == "store" else ends[::-1]
    for part in batches(runs.count, limit, most):
        count = runs.count[part].view(np.uint64)
        yield Batch(kind, way, target[part], source[part], count, int(count.sum()))
