"""An engine's sessions without the engine: a scheduler and its worker ranks, one layer group."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Final

from kvass.cli.bench.machine import PATIENCE_S
from kvass.client.client import Client
from kvass.client.parallel import ParallelStrategy
from kvass.errors import ConfigError, Unavailable
from kvass.messages import (
    Commit,
    Granted,
    Lookup,
    Matched,
    OneWay,
    Ping,
    Pong,
    Release,
    Reserve,
    ReserveItem,
)
from kvass.transfer.base import U8Array
from kvass.types import GroupLayout, RankLayout, Size

CHUNK_TOKENS: Final = 256
WIDTH: Final = 32
"""Bytes of a chunk's key."""


def fresh_name() -> str:
    """Of an instance and its weights, so of a namespace, that nobody else has."""
    return f"bench-{os.getpid()}-{os.urandom(4).hex()}"


class EngineSessions:
    """A session for the scheduler and one for each rank; rank 0 maps the arena for all of them.

    ``ending`` closes them. ``name``: of the namespace; by default one of its own. Raises
    ``KvassError``.
    """

    def __init__(
        self,
        socket: str,
        layout: GroupLayout,
        ending: ExitStack,
        *,
        strategy: ParallelStrategy | None = None,
        name: str = "",
    ) -> None:
        name = name or fresh_name()
        self.strategy = strategy or ParallelStrategy()
        self.shard_bytes = layout.shard_bytes(CHUNK_TOKENS)
        terms = (name, {"weights": name}, CHUNK_TOKENS)
        self.workers = [
            Client(
                socket,
                self.strategy.at(rank).register(*terms, RankLayout((layout,))),
                wants_arena=rank == 0,
            )
            for rank in self.strategy.readers
        ]
        self.scheduler = Client(socket, self.strategy.register(*terms))
        for client in (*self.workers, self.scheduler):
            ending.enter_context(client).connect(PATIENCE_S)
        session = self.workers[0].session
        if session is None or session.arena is None:
            raise Unavailable("the daemon went away")
        self.arena: U8Array = session.arena.buffer
        ending.callback(delattr, self, "arena")  # before the rest: a view keeps the mapping

    def reserve(self, digests: bytes, first: int = 0) -> Granted:
        """Reserve the chunks from ``first`` on. Raises ``ConfigError`` unless all are granted."""
        item = ReserveItem(request="store", digests=digests, first=first)
        granted = self.scheduler.call(Reserve(items=[item], width=WIDTH), PATIENCE_S)
        assert isinstance(granted, Granted), granted
        wanted, got = len(digests) // WIDTH - first, len(granted.grants[0].chunks)
        if got != wanted:
            row_bytes = self.strategy.world_size * self.shard_bytes
            raise ConfigError(
                f"granted {got} of {wanted} rows of {Size(row_bytes)}: give the daemon more "
                "--l1-size"
            )
        return granted

    def commit(self, granted: Granted) -> None:
        """Every rank commits; the rows are READY on return."""
        number = granted.grants[0].reservation
        self._settle(partial(Commit, boot=granted.boot, reservation=number))

    def look_up(self, digests: bytes) -> Matched:
        """A lease of every rank on these rows. Raises ``Unavailable`` unless all are in L1."""
        lookup = Lookup(request="load", digests=digests, width=WIDTH, readers=self.strategy.readers)
        matched = self.scheduler.call(lookup, PATIENCE_S)
        assert isinstance(matched, Matched), matched
        if matched.chunks != (stored := len(digests) // WIDTH):
            raise Unavailable(f"found {matched.chunks} of {stored} rows; is the daemon in use?")
        return matched

    def release(self, matched: Matched) -> None:
        """Every rank releases; the lease is gone on return."""
        self._settle(partial(Release, boot=matched.boot, lease=matched.lease))

    def _settle(self, message: Callable[..., OneWay]) -> None:
        """Every rank posts ``message`` with a ping behind it; returns when all pings are back."""
        pings = []
        for rank, worker in enumerate(self.workers):
            worker.post(message(rank=rank))
            pings.append(worker.submit(Ping()))
        for worker, seq in zip(self.workers, pings, strict=True):
            pong = worker.wait(seq, PATIENCE_S)
            assert isinstance(pong, Pong), pong
