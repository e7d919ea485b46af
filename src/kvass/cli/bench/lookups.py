"""Measures the round trips of lookups of long prompts, and of their releases."""

from __future__ import annotations

import os
import socket as sockets
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from random import Random
from typing import Any, Final

from kvass.cli.bench.rig import WIDTH, EngineConnections, percentiles_us, ratio, seconds
from kvass.types import GroupLayout

LAYOUT: Final = GroupLayout("full", 16, ("0",), (256,))
"""A chunk has 16 blocks of 256 bytes."""
ROW_BYTES: Final = 4096
RESIDENT: Final = 65_536
KEYS: Final = 512
BATCH: Final = 512
ASKS: Final = 2000
WARM_UP: Final = 100
TURN: Final = 50
_DICT: Final = """
import socket, struct, sys
count, size, width = map(int, sys.argv[1:])
sock = socket.socket(fileno=0)
keys = sock.recv(count * width, socket.MSG_WAITALL)
rows = {keys[at : at + width]: at for at in range(0, len(keys), width)}
while len(request := sock.recv(size, socket.MSG_WAITALL)) == size:
    found = [rows[request[at : at + width]] for at in range(0, size, width)]
    sock.sendall(struct.pack(f"{len(found)}I", *found))
"""
"""The process that lookups are compared with: a dict behind a socket, without kvass."""


def measure_lookups(
    socket: str,
    resident: int = RESIDENT,
    tp: int = 1,
    *,
    engines: int = 1,
    private: bool = False,
    daemon_uid: int | None = None,
) -> dict[str, Any]:
    """The figures ``lookup_128k_us``, ``release_128k_us``, ``lookup_128k_vs_dict``
    (``..._128k_tp8_...`` for 8 ranks). Each of ``engines`` has ``resident`` rows. Raises
    ``KvassError``."""
    times: dict[str, list[float]] = {"lookup": [], "release": [], "dict": []}
    with ExitStack() as ending, ThreadPoolExecutor(engines) as pool:
        asks = []
        for _ in range(engines):
            engine = EngineConnections(
                socket, (LAYOUT,), ending, tp=tp, private=private, daemon_uid=daemon_uid
            )
            ending.callback(engine.clear)
            keys = fill(engine, resident)
            asks.append(partial(_ask, engine, keys, _plain_dict(keys, ending)))
        for measured in pool.map(lambda ask: ask(), asks):
            for name, some in zip(times, zip(*measured, strict=True), strict=True):
                times[name] += some[WARM_UP:]
    round_trips = [sum(pair) for pair in zip(times["lookup"], times["release"], strict=True)]
    name = "128k" if tp == 1 else f"128k_tp{tp}"
    return {
        f"lookup_{name}_us": percentiles_us(times["lookup"]),
        f"release_{name}_us": percentiles_us(times["release"]),
        f"lookup_{name}_vs_dict": ratio(round_trips, times["dict"]),
    }


def _ask(
    engine: EngineConnections, keys: list[bytes], plain: sockets.socket
) -> list[tuple[float, float, float]]:
    """Seconds of lookups, of their releases, and of the dict's answers.

    Each lookup has the keys of one stored prompt. Keys of many prompts would lie in 512 places of
    memory, and no engine looks up such keys. ``TURN`` lookups go to the dict, then ``TURN`` to the
    daemon. With single turns each would find the processor's caches full of the other's memory.
    """
    random, times = Random(0), list[tuple[float, float, float]]()
    prompts = [b"".join(keys[at : at + KEYS]) for at in range(0, len(keys) - KEYS + 1, KEYS)]

    def ask_dict(digests: bytes) -> None:
        plain.sendall(digests)
        plain.recv(KEYS * 4, sockets.MSG_WAITALL)

    def ask_daemon(digests: bytes) -> tuple[float, float]:
        began_s = time.perf_counter()
        matched = engine.look_up(digests)
        lookup_s = time.perf_counter() - began_s
        return lookup_s, seconds(partial(engine.release, matched))

    while len(times) < WARM_UP + ASKS:
        turn = random.choices(prompts, k=TURN)
        plain_s = [seconds(partial(ask_dict, digests)) for digests in turn]
        ours_s = [ask_daemon(digests) for digests in turn]
        times += [(*ours, plain) for ours, plain in zip(ours_s, plain_s, strict=True)]
    return times


def _plain_dict(keys: list[bytes], ending: ExitStack) -> sockets.socket:
    """The socket of a new process that runs ``_DICT``. ``ending`` closes both."""
    ours, theirs = sockets.socketpair()
    sizes = (str(size) for size in (len(keys), KEYS * WIDTH, WIDTH))
    with theirs:
        process = subprocess.Popen([sys.executable, "-c", _DICT, *sizes], stdin=theirs.fileno())
    ending.enter_context(process)
    ending.callback(ours.close)  # first: this ends the process
    ours.sendall(b"".join(keys))
    return ours


def fill(engine: EngineConnections, rows: int) -> list[bytes]:
    """Store ``rows`` rows without writing their bytes. Returns their keys."""
    keys = [os.urandom(WIDTH) for _ in range(rows)]
    for at in range(0, rows, BATCH):
        engine.commit(engine.reserve(b"".join(keys[at : at + BATCH])))
    return keys
