"""Lookups of what L1 has, while the tier behind it is kept busy."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from bench.flood import Flood
from bench.rows import tier_status, wait_tier
from kvass.cli.bench.lookups import LAYOUT, fill
from kvass.cli.bench.rig import PATIENCE_S, EngineConnections
from kvass.client.client import Client
from kvass.errors import Unavailable
from kvass.messages import Release

CHUNKS: Final = 32
"""8,192 tokens."""
_PACE_S: Final = 0.001
"""Between lookups, as an engine has steps between them."""
_FEWEST: Final = 30
_IDLE_S: Final = 2.0
_ROOT: Final = Path(__file__).parent.parent


def measure_pressure(todo: Flood, seconds: float) -> dict[str, Any]:
    """p50 and p99 of a lookup's round trip with nothing else to do, and during ``todo``, for which
    ``seconds`` or until it ends; and how fast the tier stored and loaded meanwhile."""
    with ExitStack() as ending:
        rows = EngineConnections(todo.socket, (LAYOUT,), ending)
        prompt = b"".join(fill(rows, CHUNKS))
        _lookups(rows, prompt, min(seconds, _IDLE_S))  # warms up
        idle = _lookups(rows, prompt, min(seconds, _IDLE_S))
        client = ending.enter_context(Client(todo.socket))
        with _flooding(todo) as process:
            _wait_busy(client, process)
            before, began_s = tier_status(client), time.monotonic()
            busy = _lookups(rows, prompt, seconds, process)
            after, took_s = tier_status(client), time.monotonic() - began_s

    def gbps(name: str) -> float:
        moved = after.get(name, 0) - before.get(name, 0)
        return float(moved * todo.row_bytes / took_s / 1e9)

    return {
        "lookup_p50_idle_us": float(np.percentile(idle, 50)) * 1e6,
        "lookup_p99_idle_us": float(np.percentile(idle, 99)) * 1e6,
        "lookup_p50_under_tier_load_us": float(np.percentile(busy, 50)) * 1e6,
        "lookup_p99_under_tier_load_us": float(np.percentile(busy, 99)) * 1e6,
        "lookup_max_under_tier_load_us": max(busy) * 1e6,
        "tier_load_store_gbps": gbps("stored_rows"),
        "tier_load_load_gbps": gbps("loaded_rows"),
    }


def _lookups(
    rows: EngineConnections,
    prompt: bytes,
    lasting_s: float,
    during: subprocess.Popen[bytes] | None = None,
) -> list[float]:
    """Seconds of each, for so long, or as long as a process runs."""
    times: list[float] = []
    end = time.monotonic() + lasting_s
    while time.monotonic() < end and (during is None or during.poll() is None):
        began_s = time.perf_counter()
        matched = rows.look_up(prompt)
        times.append(time.perf_counter() - began_s)
        rows.workers[0].post(Release(boot=matched.boot, lease=matched.lease, rank=0))
        time.sleep(_PACE_S)
    if len(times) < _FEWEST:
        raise Unavailable(f"only {len(times)} lookups while the tier was busy: too few to judge")
    return times


def _wait_busy(client: Client, process: subprocess.Popen[bytes]) -> None:
    """Until rows go both ways."""
    first = tier_status(client)

    def both(tier: dict[str, Any]) -> bool:
        moved = (tier.get(n, 0) > first.get(n, 0) for n in ("stored_rows", "loaded_rows"))
        return all(moved) or process.poll() is not None

    wait_tier(client, both, "the tier to be busy")


@contextmanager
def _flooding(todo: Flood) -> Iterator[subprocess.Popen[bytes]]:
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.flood", msgspec.json.encode(todo).decode()],
            stderr=errors,
            cwd=_ROOT,
        )
        try:
            yield process
        finally:
            process.terminate()
            ended = process.wait(PATIENCE_S)
        if ended > 0:
            errors.seek(0)
            raise Unavailable(f"the load ended: {errors.read().decode().strip()[-300:]}")
