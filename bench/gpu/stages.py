"""Stages for short pages (``transfer/staging.py``), and what else could copy such pages.

``measure_stages`` gives, for each geometry whose pages are shorter than ``LONGEST``:

- ``gpu_plain_...`` and ``gpu_staged_...``: the figures of ``bench.gpu`` by that name, without
  stages and with stages for both kinds, whatever the engine would choose.
- ``gpu_staged_chosen``: by kind, below which length of runs an engine uses stages here.
- ``gpu_gather_gbps``: the engine's kernel alone, from the pages to a stage, on the device.
  ``gpu_gather_torch_gbps``: ``index_select`` of each layer into a stage instead.
- ``gpu_host_kernel_gbps``: the engine's kernel from the pages to pinned memory of the host, without
  a stage. vLLM uses it for loads only.
- ``gpu_staged_gemm_slowdown``: as ``gpu_gemm_slowdown``, beside stores through stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from bench.geometries import GEOMETRIES, Geometry
from bench.gpu import copy_figures, measure_rounds
from bench.gpu.costs import PRODUCTS, measure_gemm
from bench.gpu.device import Device
from bench.gpu.rig import Rig
from kvass.cli.bench.rig import say
from kvass.errors import Unavailable
from kvass.transfer.batch import MAX_DESCRIPTORS, Kind, Stage, Staging, Stagings
from kvass.transfer.descriptors import plan_runs
from kvass.transfer.device_mover import NO_STAGES
from kvass.transfer.staging import STAGE_BYTES, STAGES, shortest

KINDS: tuple[Kind, ...] = ("store", "load")


def measure_stages(
    device: Device,
    rounds: int,
    geometries: Sequence[Geometry] = GEOMETRIES,
    tokens: int = 4096,
    products: int = PRODUCTS,
    note: Callable[..., object] = dict,
) -> dict[str, Any]:
    """All figures, by the names in this module's docstring; ``note`` is given those there are, as
    they come. Raises ``KvassError``."""
    figures: dict[str, Any] = dict(device.facts()) | {"rounds": rounds, "bytes_equal": True}
    for one in geometries:
        if shortest(one.planes(one.blocks(tokens, 2))) is None:
            continue
        say(f"{one.name}, with stages and without")
        found = _measure(device, one, tokens, rounds, products)
        figures["bytes_equal"] = found.pop("bytes_equal") and figures["bytes_equal"]
        for name, value in found.items():
            figures.setdefault(name, {})[one.name] = value
        note(**figures)
    return figures


def open_stagings(device: Device) -> Stagings:
    """Stages for both kinds and all runs. Raises ``Unavailable``."""
    found = dict[Kind, Staging]()
    for kind in KINDS if device.runtime.tables is not None else ():
        opened = [device.runtime.open_stage(STAGE_BYTES) for _ in range(STAGES)]
        stages = tuple(one for one in opened if isinstance(one, Stage))
        if len(stages) < STAGES:
            raise Unavailable("no memory for stages")
        found[kind] = Staging(1 << 40, stages)
    return found


def _measure(
    device: Device, one: Geometry, tokens: int, rounds: int, products: int
) -> dict[str, Any]:
    figures: dict[str, Any] = {"bytes_equal": True}
    stagings = open_stagings(device)
    for name, some in (("plain", NO_STAGES), ("staged", stagings)):
        rig = Rig(device, one, tokens, some)
        try:
            times, same = measure_rounds(rig, device.plain(rig.bytes), rounds)
            if name == "plain":
                chosen = device.stagings(rig.region, rig.planes)
                figures["gpu_staged_chosen"] = {kind: x.below for kind, x in chosen.items()}
                figures |= _alone(rig, rounds)
        finally:
            rig.close()
        figures["bytes_equal"] = figures["bytes_equal"] and same
        for key, value in copy_figures(times, rig.bytes).items():
            if "_pinned_" not in key:
                figures[key.replace("gpu_", f"gpu_{name}_", 1)] = value
    beside = measure_gemm(device, one, tokens, rounds, products, stagings)
    return figures | {"gpu_staged_gemm_slowdown": beside["gpu_gemm_slowdown"]}


def _alone(rig: Rig, rounds: int) -> dict[str, float]:
    """The engine's kernel and torch's, on at most ``STAGE_BYTES`` of the first plan's pages."""
    device, plan = rig.device, rig.stores[0][0]
    runs = next(iter(plan_runs([plan], [rig.region], 1 << 62)))
    most = min(MAX_DESCRIPTORS, int(np.searchsorted(np.cumsum(runs.count), STAGE_BYTES)))
    runs = runs[slice(max(1, most))]
    total = int(runs.count.sum())
    stage = device.allocate(max(STAGE_BYTES, total))
    offsets = np.cumsum(runs.count) - runs.count
    try:
        taken = {
            "gpu_gather_gbps": partial(
                device.kernel_s, runs.device, stage.address + offsets, runs.count
            ),
            "gpu_host_kernel_gbps": partial(
                device.host_kernel_s, runs.device, offsets, runs.count, total
            ),
        }
        found = {name: _gbps(call, total, rounds) for name, call in taken.items()}
        ids = np.concatenate([row.blocks for row in plan.rows])
        ids = ids[: STAGE_BYTES // plan.planes.block_bytes or 1]
        size = len(ids) * plan.planes.block_bytes
        select = partial(device.index_select_s, rig.region, plan.planes, ids)
        found["gpu_gather_torch_gbps"] = _gbps(select, size, rounds)
    finally:
        device.free(stage)
    return {name: value for name, value in found.items() if value}


def _gbps(call: Any, total: int, rounds: int) -> float:
    """The median; 0 where the device cannot do it. The first call warms up."""
    times = [call() for _ in range(rounds + 1)][1:]
    return 0.0 if None in times else total / median(times) / 1e9
