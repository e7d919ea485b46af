"""What the engine's Python costs a load: its copy thread needs the GIL between two pieces.

A load of ``LOAD_BYTES`` runs in ``N`` batches, each a call of the engine's copy operation.
Meanwhile the engine's thread waits (``idle``), or computes in Python and lets go of the GIL only
when it is asked to (``busy``): after ``sys.getswitchinterval()``, 5 ms.

- ``gil_busy_N_ms``, ``gil_idle_N_ms``: from ``submit`` to the end of the load. ``shipped``: as
  ``DeviceMover`` cuts it by itself.
- ``gil_busy_N_vs_1``, ``gil_idle_N_vs_1``: how much longer than in one batch.
- ``gil_wait_ms``: how long the copy thread waits for a call beside the first one, if it is busy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Final

from bench.geometries import geometry
from bench.gpu.device import Device
from bench.gpu.rig import Rig, check
from kvass.cli.bench.rig import PATIENCE_S, seconds
from kvass.errors import Unavailable
from kvass.transfer.base import Done, Job
from kvass.transfer.device_mover import BATCH_BYTES, NO_STAGES

MODEL: Final = "llama_8b"
LOAD_TOKENS: Final = 512
LOAD_BYTES: Final = 64 << 20
BATCHES: Final = {n: LOAD_BYTES // int(n) for n in ("1", "4", "16")}
Wait = Callable[[threading.Event], None]


def measure_gil(device: Device, rounds: int) -> dict[str, float]:
    """All figures, by the names in this module's docstring. Raises ``KvassError``."""
    device.need(4 * LOAD_BYTES)
    times: dict[str, list[float]] = {}
    for name, size in {**BATCHES, "shipped": BATCH_BYTES}.items():
        rig = Rig(device, geometry(MODEL), LOAD_TOKENS, NO_STAGES, size)
        assert rig.bytes == LOAD_BYTES
        try:
            rig.move(("store", rig.stores[0]))  # pins
            for number in range(rounds + 1):
                for how, wait in (("idle", _rest), ("busy", _compute)):
                    took_s = seconds(partial(_load, rig, wait))
                    if number:
                        times.setdefault(f"{how}_{name}", []).append(took_s)
        finally:
            rig.close()
    took = {name: 1000 * median(some) for name, some in times.items()}
    figures = {f"gil_{name}_ms": value for name, value in took.items()}
    for name in took:
        how, _, batches = name.partition("_")
        if batches != "1":
            figures[f"gil_{name}_vs_1"] = took[name] / took[f"{how}_1"]
    more = [took[f"{how}_16"] - took[f"{how}_1"] for how in ("busy", "idle")]
    return figures | {"gil_wait_ms": max(0.0, more[0] - more[1]) / 15}


def _load(rig: Rig, wait: Wait) -> None:
    over, ended = threading.Event(), list[Done]()

    def done(one: Done) -> None:
        ended.append(one)
        over.set()

    rig.mover.submit(Job("load", rig.loads[0], rig.arena.buffer, on_done=done))
    wait(over)
    if not ended:
        raise Unavailable("a load did not end")
    check(ended)
    rig.mover.poll()


def _rest(over: threading.Event) -> None:
    over.wait(PATIENCE_S)


def _compute(over: threading.Event) -> None:
    """As a scheduler does: no call in it lets go of the GIL."""
    steps = 0
    while not over.is_set() and steps < 1 << 30:
        steps += 1
