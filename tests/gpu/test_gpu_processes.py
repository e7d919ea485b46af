"""Workers in processes of their own: they share one arena, and one is killed amid a copy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.geometries import geometry as named
from kvass.arena import memory
from kvass.testing.daemon import Daemon, running_daemon
from tests.gpu.child import ROWS, child, prompt
from tests.gpu.conftest import NEEDS_GPU
from tests.gpu.device import Device, open_device
from tests.gpu.engine import DeviceEngine
from tests.gpu.kv import NAMES, on
from tests.support.waiting import eventually

WHERE = ["fake", pytest.param("cuda", marks=NEEDS_GPU)]


@pytest.mark.parametrize("where", WHERE)
def test_two_processes_share_one_arena(where: str) -> None:
    """From a GPU to the arena in one, from there to a GPU in the other, of every geometry."""
    share(where)


@pytest.mark.parametrize("where", WHERE[1:])
def test_expandable_segments(where: str) -> None:
    """One storage is many pieces of memory then, one behind the other."""
    share(where, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")


def share(where: str, **setting: str) -> None:
    device = open_device(where)
    geometries = [on(device, named(name)) for name in NAMES]
    arenas = [memory.create(g.arena_bytes(ROWS * g.chunk_tokens)) for g in geometries]
    fds = [arena.fileno() for arena in arenas]
    with child(where, fds, **setting) as one, child(where, fds, **setting) as two:
        for name, arena in zip(NAMES, arenas, strict=True):
            stored = one.ask("store", name, arena.fileno(), arena.size)
            assert two.ask("load", name, arena.fileno(), arena.size) == stored
        if setting:
            assert one.ask("expandable")
            assert two.ask("expandable")
    for arena in arenas:
        arena.close()


# ------------------------------------------------------------ SIGKILL amid a copy

GRACE_S = 2.0
DONE, AMID, CHUNKS = 1, 2, 4


@pytest.fixture
def daemon(tmp_path: Path, device: Device) -> Iterator[Daemon]:
    size = "6GiB" if device.real else "64MiB"
    with running_daemon(tmp_path, size, lost_engine_grace_s=GRACE_S) as one:
        yield one


@pytest.mark.parametrize("name", ["llama_8b", "gpt_oss", "deepseek_v4"])
def test_a_worker_is_killed_amid_a_copy(device: Device, daemon: Daemon, name: str) -> None:
    """What it had committed is right; of the rest nothing is ever read, and its slots are nobody's
    until its copies cannot run any more."""
    with child("cuda" if device.real else "fake") as one:
        one.ask("engine", daemon.socket, name, 3 * CHUNKS)
        assert one.ask("stored", DONE, CHUNKS) == CHUNKS
        one.ask("stall", AMID, CHUNKS, 3)
        assert daemon.status()["reservations"] == 1
        one.kill()
        assert eventually(lambda: bool(daemon.status()["quarantined_bytes"]))
    again = DeviceEngine(daemon.socket, device, name, rows=3 * CHUNKS, seed=5)
    try:
        assert again.match(prompt(again, AMID, CHUNKS)) is None
        assert load(again, DONE) == CHUNKS
        what = again.reserve(prompt(again, AMID, CHUNKS))
        assert what is not None
        again.step(what)
        assert again.wait(what) == CHUNKS
        assert load(again, AMID) == CHUNKS
        assert load(again, DONE) == CHUNKS
    finally:
        again.close()
    daemon.wait_until(leases=0, reservations=0, pins=0, quarantined_bytes=0)


def load(engine: DeviceEngine, first: int) -> int:
    """Load a prompt and check it: its rows."""
    what = engine.match(prompt(engine, first, CHUNKS))
    assert what is not None
    engine.step(what)
    rows = engine.wait(what)
    assert engine.verify() > 0
    return rows
