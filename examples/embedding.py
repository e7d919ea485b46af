"""The smallest engine that keeps its KV pages in kvass: one layer group, one rank, one request at a
time. ``docs/embedding.md`` explains it. ``python -m examples.embedding`` starts a daemon and runs
two engines, one after the other: the first computes four chunks and stores them, the second loads
them. ``--socket PATH`` runs one, with a daemon of yours. Exit status 1 if a loaded page is wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvass import ParallelStrategy, SchedulerClient, WorkerClient
from kvass.client.lookups import PENDING, Match
from kvass.messages import ReserveItem
from kvass.testing.daemon import running_daemon
from kvass.types import GroupLayout, RankLayout

Pages = npt.NDArray[np.uint8]
CHUNK_TOKENS, BLOCK_TOKENS, PAGE_BYTES, WIDTH = 256, 16, 8192, 32
GROUP = GroupLayout("full", BLOCK_TOKENS, ("layers.0", "layers.1"), (PAGE_BYTES, PAGE_BYTES))
CHUNK = (len(GROUP.layers), CHUNK_TOKENS // BLOCK_TOKENS, PAGE_BYTES)
"""The shape of a chunk's pages: layers, blocks of a chunk, bytes of a page."""
ROW_BYTES = GROUP.shard_bytes(CHUNK_TOKENS)


class Engine:
    """The sessions of the engine: that of its scheduler, and that of its only rank."""

    def __init__(self, socket: str, name: str, weights: str) -> None:
        one, identity = ParallelStrategy(), {"weights": weights, "engine": "example 1"}
        terms = one.register(name, identity, CHUNK_TOKENS, model="example")
        self.scheduler = SchedulerClient(socket, terms, step_wait_s=1.0, reserve_wait_s=1.0)
        layout = RankLayout((GROUP,))
        self.rank = WorkerClient(socket, one.at(0).register(name, identity, CHUNK_TOKENS, layout))
        self.rank.connect(timeout_s=10)
        self.scheduler.connect(timeout_s=10)

    def load(self, keys: list[bytes]) -> Pages:
        """The pages of the longest prefix of ``keys`` that is stored: shape ``(n, *CHUNK)``."""
        none = np.empty((0, *CHUNK), np.uint8)
        self.scheduler.new_step()
        while (found := self.scheduler.match("r", b"".join(keys), WIDTH, first=0)) is PENDING:
            time.sleep(0.001)
            self.scheduler.new_step()
        if not isinstance(found, Match):
            self.scheduler.give_back("r")
            return none
        self.scheduler.take("r")
        if not self.scheduler.handed_over([found.lease], [], found.boot):
            self.scheduler.release(found.boot, found.lease)
            return none
        places = found.slots[0].offsets(0, ROW_BYTES)
        pages = np.empty((len(places), *CHUNK), np.uint8)
        if (lease := self.rank.arena(found.boot, found.given_s)) is not None:
            with lease as arena:
                for page, at in zip(pages, places, strict=True):
                    page.reshape(-1)[:] = arena[at : at + page.nbytes]
        in_time = lease is not None and time.monotonic() < found.deadline_s
        self.rank.release(found.boot, found.lease)
        return pages if in_time else none

    def store(self, keys: list[bytes], pages: Pages) -> int:
        """Store the chunks that are missing. ``pages``: shape ``(len(keys), *CHUNK)``. Returns how
        many chunks were written."""
        self.scheduler.new_step()
        granted = self.scheduler.reserve([ReserveItem("r", b"".join(keys))], WIDTH)
        if granted is None or not (grant := granted.grants[0]).reservation:
            return 0
        if not self.scheduler.handed_over([], [grant.reservation], granted.boot):
            self.scheduler.abort(granted.boot, grant.reservation)
            return 0
        if (lease := self.rank.arena(granted.boot, granted.given_s)) is None:
            self.rank.abort(granted.boot, grant.reservation)
            return 0
        places = grant.slots[0].offsets(0, ROW_BYTES)
        with lease as arena:
            for chunk, at in zip(grant.chunks, places, strict=True):
                lease.prepare(at, at + ROW_BYTES)
                arena[at : at + pages[chunk].nbytes] = pages[chunk].reshape(-1)
        self.rank.commit(granted.boot, grant.reservation)
        return len(grant.chunks)

    def close(self) -> None:
        self.rank.close()
        self.scheduler.close()


def keys_of(prompt: list[int]) -> list[bytes]:
    """A key for each whole chunk: a digest of all tokens up to its end."""
    tokens, hashed, keys = np.array(prompt, "<u4"), hashlib.sha256(), []
    for end in range(CHUNK_TOKENS, len(prompt) + 1, CHUNK_TOKENS):
        hashed.update(tokens[end - CHUNK_TOKENS : end].tobytes())
        keys.append(hashed.digest())
    return keys


def compute(keys: list[bytes]) -> Pages:
    """Stands for the model: the pages of each chunk, which follow from the tokens up to its
    end."""
    seeds = [int.from_bytes(key[:8], "little") for key in keys]
    chunks = [np.random.default_rng(seed).integers(0, 256, CHUNK, np.uint8) for seed in seeds]
    return np.array(chunks, np.uint8).reshape(-1, *CHUNK)


def run(socket: str) -> bool:
    """An engine that answers one prompt: load what is stored, compute the rest, store it. Returns
    whether the loaded pages are those that it would have computed."""
    engine = Engine(socket, f"example-{time.monotonic_ns()}", "weights 1")
    try:
        keys = keys_of(list(range(1100)))
        loaded = engine.load(keys)
        stored = engine.store(keys, np.concatenate([loaded, compute(keys[len(loaded) :])]))
        same = np.array_equal(loaded, compute(keys[: len(loaded)]))
    finally:
        engine.close()
    right = "right" if same else "WRONG"
    print(f"{len(keys)} chunks: {len(loaded)} loaded, {stored} stored, {right}")
    return same


def main(argv: list[str] | None = None) -> int:
    """One engine with the daemon of ``--socket``, or two with one of its own; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m examples.embedding")
    parser.add_argument("--socket", help="run one engine (default: start a daemon, run two)")
    if socket := parser.parse_args(argv).socket:
        return 0 if run(socket) else 1
    with tempfile.TemporaryDirectory() as folder, running_daemon(Path(folder)) as daemon:
        return 0 if all([run(daemon.socket), run(daemon.socket)]) else 1


if __name__ == "__main__":
    sys.exit(main())
