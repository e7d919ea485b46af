"""Warm starts that are under way: what they were to load, and what is left."""

from __future__ import annotations

import numpy as np

from kvass.core.pending.warm_starts import WarmPart, WarmStart, WarmStarts
from tests.core.rig import Rig


def test_the_figures_are_those_of_all_that_are_under_way() -> None:
    rig = Rig()
    rig.engine()
    (ns,) = rig.machine.state.namespaces.values()
    starts = WarmStarts(room_bytes=9)
    assert (starts.planned_bytes, starts.left_bytes) == (0, 0)
    part = WarmPart(ns.classes[0], np.zeros((3, 4), np.uint64), np.arange(3))
    for number in range(2):
        starts.all[number] = WarmStart(ns, 0, 0, 1, 0, 0, planned_bytes=5 * 4096)
        starts.all[number].parts.append(part)
        starts.all[number].loading_bytes = 4096
    assert part.size_bytes == 3 * 4096
    assert (starts.planned_bytes, starts.left_bytes) == (10 * 4096, 8 * 4096)
    del starts.all[0]
    assert (starts.planned_bytes, starts.left_bytes) == (5 * 4096, 4 * 4096)
