"""KV pages between a GPU and the arena, against plain copies as large: stage a of a GPU day.

Every ratio is the median over rounds in which both sides alternate, every byte is compared after
every load (on the device, page against page), and each round has other bytes.

What the names mean. Where a figure has a value per geometry (``bench.geometries``: page sizes,
groups and strides of real models; ``_blocks``: blocks outermost), the whole chunks of 4,096 tokens,
in scattered blocks, move in one job, through ``DeviceMover``, between device memory and shared
memory like the daemon's: from ``submit`` until the mover says that it is done. Loads are of all
that was stored, also of what a window's hit would not need.

- ``gpu_store_vs_pinned``, ``gpu_load_vs_pinned``: against *one contiguous* cudaMemcpyAsync of as
  many bytes between device memory and pinned memory of torch's own, and the wait for it.
- ``gpu_both_vs_one``: how much more is moved in a second when a store and a load run at once, than
  by one of them alone (2: as much again). ``gpu_pinned_both_vs_one``: the same of plain copies.
- ``gpu_store_gbps``, ``gpu_load_gbps``, ``gpu_pinned_store_gbps``, ``gpu_pinned_load_gbps``;
  ``gpu_run_kib``: the longest run that scattered blocks leave.
- ``gpu_submit_us``: ``submit`` of one chunk (a job of all groups) on the engine's thread, one a
  millisecond, over all geometries; ``gpu_plan_us``: making its plan before.
- ``gpu_gemm_slowdown``: how much longer products of bf16 matrices of 8,192 x 8,192 take beside
  stores without a pause (0.05: five percent); ``gpu_gemm_stores_vs_alone``: how fast those were.
- ``pin_s_per_gib``: registering 1 GiB of shared memory that is faulted in.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, Final

import msgspec
import numpy as np

from bench.geometries import GEOMETRIES, Geometry, geometry
from bench.gpu.costs import PIN_BYTES, PRODUCTS, measure_gemm, measure_pinning
from bench.gpu.device import Device, Plain
from bench.gpu.rig import Rig
from kvass._version import __version__
from kvass.cli.bench.rig import percentiles_us, ratio, say, seconds

SUBMIT_EVERY_S: Final = 1e-3
NEED_BYTES: Final = 6 << 30


class Sizes(msgspec.Struct, frozen=True):
    """How much of it."""

    geometries: tuple[Geometry, ...] = GEOMETRIES
    tokens: int = 4096
    gemm: Geometry = geometry("llama_8b")
    products: int = PRODUCTS
    pin_bytes: int = PIN_BYTES
    need_bytes: int = NEED_BYTES


def measure_gpu(
    device: Device, rounds: int, sizes: Sizes | None = None, note: Callable[..., object] = dict
) -> dict[str, Any]:
    """All figures, by the names in this module's docstring; ``note`` is given those there are, as
    they come. Raises ``KvassError``."""
    sizes = sizes or Sizes()
    device.need(sizes.need_bytes)
    figures: dict[str, Any] = {"version": __version__, "rounds": rounds} | device.facts()
    figures["bytes_equal"] = True
    say("pinning")
    figures |= measure_pinning(device, sizes.pin_bytes)
    submits = _Submits()
    for one in sizes.geometries:
        say(f"{one.name}, {rounds} rounds of {sizes.tokens} tokens")
        _measure_geometry(figures, device, one, sizes.tokens, rounds, submits)
        note(**figures)
    figures |= submits.figures()
    say(f"matrix products beside stores, {rounds} rounds")
    return figures | measure_gemm(device, sizes.gemm, sizes.tokens, rounds, sizes.products)


# ---------------------------------------------------------------- a geometry


def _measure_geometry(
    figures: dict[str, Any],
    device: Device,
    one: Geometry,
    tokens: int,
    rounds: int,
    submits: _Submits,
) -> None:
    rig = Rig(device, one, tokens)
    try:
        plain = device.plain(rig.bytes)
        times, same = measure_rounds(rig, plain, rounds)
        submits.measure(rig)
    finally:
        rig.close()
    runs = [plane.run for group in rig.planes for plane in group.planes]
    more = copy_figures(times, rig.bytes) | {"gpu_run_kib": max(runs) / 1024}
    for name, value in more.items():
        figures.setdefault(name, {})[one.name] = value
    figures["bytes_equal"] = figures["bytes_equal"] and same


def measure_rounds(rig: Rig, plain: Plain, rounds: int) -> tuple[dict[str, list[float]], bool]:
    """Seconds of each step in each round, and whether all that was loaded is what was stored."""
    (store, other_store), (load, other_load) = rig.stores, rig.loads
    steps: dict[str, tuple[Callable[[], None], bool]] = {  # whether it loads, into spoilt pages
        "plain store": (lambda: plain.move("store"), False),
        "store": (lambda: rig.move(("store", store)), False),
        "plain load": (lambda: plain.move("load"), False),
        "load": (lambda: rig.move(("load", load)), True),
        "plain both": (lambda: plain.move("store", "load"), False),
        "both": (lambda: rig.move(("store", other_store), ("load", load)), True),
        "other": (lambda: rig.move(("load", other_load)), True),  # what "both" stored
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    same = True
    for number in range(rounds + 1):  # the first warms up, and pins
        rig.fill(number)
        for name, (step, loads) in steps.items():
            if loads:
                rig.spoil()
            took_s = seconds(step)
            if number:
                times[name].append(took_s)
            if loads:
                same = rig.same() and same
    return times, same


def copy_figures(times: dict[str, list[float]], size: int) -> dict[str, float]:
    """The figures of a geometry, of the times that ``measure_rounds`` took for ``size`` bytes."""

    def gain(both: str, *alone: str) -> float:
        one = np.sum([times[name] for name in alone], axis=0)
        return float(np.median(one / np.array(times[both])))

    def gbps(name: str) -> float:
        return size / median(times[name]) / 1e9

    return {
        "gpu_store_vs_pinned": ratio(times["store"], times["plain store"]),
        "gpu_load_vs_pinned": ratio(times["load"], times["plain load"]),
        "gpu_both_vs_one": gain("both", "store", "load"),
        "gpu_pinned_both_vs_one": gain("plain both", "plain store", "plain load"),
        "gpu_store_gbps": gbps("store"),
        "gpu_load_gbps": gbps("load"),
        "gpu_pinned_store_gbps": gbps("plain store"),
        "gpu_pinned_load_gbps": gbps("plain load"),
    }


class _Submits:
    """What storing a chunk costs the engine's thread, over all geometries."""

    def __init__(self) -> None:
        self._submit: list[float] = []
        self._plan: list[float] = []

    def measure(self, rig: Rig) -> None:
        """Every chunk by itself, one a millisecond, while those before it are on their way."""
        gc.collect()
        for row in range(rig.rows):
            began_s = time.perf_counter()
            plans = rig.chunk(row)
            planned_s = time.perf_counter()
            self._submit.append(seconds(partial(rig.submit, "store", plans)))
            self._plan.append(planned_s - began_s)
            time.sleep(SUBMIT_EVERY_S)
        rig.end()

    def figures(self) -> dict[str, dict[str, float]]:
        """Microseconds."""
        return {
            "gpu_submit_us": percentiles_us(self._submit),
            "gpu_plan_us": percentiles_us(self._plan),
        }
