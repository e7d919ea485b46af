"""A fake engine: a scheduler and its ranks over a real daemon, without torch and without a model.

It follows all rules of a connector. ``kill`` ends a rank as SIGKILL does: it sends none of the
commits and releases that it owes. The content of a page follows from its chunk and its place in it
(``pages``), so every loaded page can be checked.

::

    layouts = spread(world, RankLayout((GroupLayout("full", 4, ("l0", "l1"), (64, 64)),)))
    with FakeEngine(socket, ParallelStrategy(tp=2, pp=2), layouts) as engine:
        engine.store(range(64))
        assert engine.load(range(64)) == 4
        engine.verify()

To kill a rank in the middle of a transfer, call the steps of ``store`` and ``load`` one by one:
``reserve`` or ``match``, ``hand_over``, ``copy``, ``wait``.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Self

import msgspec
import numpy as np

from kvass.client.endpoint import Endpoint
from kvass.client.lookups import PENDING, Match, Pending
from kvass.client.parallel import ParallelStrategy
from kvass.client.scheduler import SchedulerClient
from kvass.client.segments import SegmentClient
from kvass.errors import Unavailable, UsageError
from kvass.messages import Ping, RequestContext, ReserveItem, Segments
from kvass.testing.fake_rank import FakeRank, MakeMover, Transfer, hang_up
from kvass.transfer.host import HostMover
from kvass.types import SCHEDULER, I64Array, RankLayout

WIDTH: Final = 16
"""Bytes of a chunk hash: SHA-256 cut to 128 bits."""
PATIENCE_S: Final = 30.0
"""How long to wait for an answer. It is long, for machines with much load."""

SLOW_TOKENS_S: Final = 0.01
"""The engine's prefill speed in tokens per second. It is so low that the daemon always loads from
tiers."""

_names = itertools.count()


def spread(world: ParallelStrategy, layout: RankLayout) -> tuple[RankLayout, ...]:
    """The layout of each shard: its part of the ``layout`` of a model.

    The layers of each group are divided evenly among the ``world.pp`` pipeline stages. Page sizes
    are those of one shard. Raises ``UsageError`` if a group has fewer layers than there are stages.
    """
    if any(len(group.layers) < world.pp for group in layout.groups):
        raise UsageError(f"{world.pp} stages: give every group at least as many layers")
    stages = []
    for stage in range(world.pp):
        groups = []
        for group in layout.groups:
            lo, hi = (len(group.layers) * (stage + i) // world.pp for i in (0, 1))
            part = {"layers": group.layers[lo:hi], "page_bytes": group.page_bytes[lo:hi]}
            groups.append(msgspec.structs.replace(group, **part))
        stages.append(RankLayout(tuple(groups)))
    each = world.world_size // world.pp
    return tuple(stages[shard // each] for shard in range(world.world_size))


def chunk_keys(prompt: Sequence[int], chunk_tokens: int) -> list[bytes]:
    """One key per whole chunk: SHA-256 of the previous key and the tokens as uint32."""
    keys, parent = list[bytes](), b""
    for at in range(0, len(prompt) - chunk_tokens + 1, chunk_tokens):
        tokens = prompt[at : at + chunk_tokens]
        parent = hashlib.sha256(parent + struct.pack(f"<{chunk_tokens}I", *tokens)).digest()[:WIDTH]
        keys.append(parent)
    return keys


class FakeEngine:
    """An engine with the ranks of ``world``. ``layouts`` has one for each shard (see ``spread``).

    Each group has ``blocks`` block ids, of which 0 is the null block. ``seed`` decides the order in
    which they are used. ``tenant`` is the tenant of its requests, and may be changed. The
    constructor waits until all connections are registered. Use an engine from one thread.

    Raises ``Unavailable`` if there is no daemon within ``PATIENCE_S``, and ``UsageError`` if a
    prompt needs more blocks than are free.
    """

    def __init__(
        self,
        socket: str,
        world: ParallelStrategy,
        layouts: Sequence[RankLayout],
        *,
        chunk_tokens: int = 16,
        instance: str = "",
        identity: Mapping[str, str] | None = None,
        blocks: int = 512,
        seed: int = 0,
        mover: MakeMover = HostMover,
        tenant: str = "",
    ) -> None:
        if len(layouts) != world.world_size:
            raise UsageError(f"{len(layouts)} layouts: give one for each of {world.world_size}")
        self.socket = socket
        self.world = world
        self.layouts = tuple(layouts)
        self.chunk_tokens = chunk_tokens
        self.instance = instance or f"fake-{os.getpid()}-{next(_names)}"
        self.identity = {"model": self.instance} if identity is None else dict(identity)
        self.blocks = blocks
        self.tenant = tenant
        self.session = 0
        """The tag of the client's session whose requests come next; 0: of none."""
        self._mover = mover
        order = np.random.default_rng(seed)
        self._free = [1 + order.permutation(blocks - 1) for _ in layouts[0].groups]
        self._requests = itertools.count()
        self._loaded: list[tuple[Transfer, list[FakeRank]]] = []
        self.ranks = [self._new_rank(rank) for rank in world.readers]
        self.scheduler = self._new_scheduler()
        self.wait_connected()

    def _new_rank(self, rank: int) -> FakeRank:
        here = self.world.at(rank)
        layout = self.layouts[here.shard]
        terms = here.register(self.instance, self.identity, self.chunk_tokens, layout)
        return FakeRank(self.socket, terms, self.blocks, self._mover)

    def _new_scheduler(self) -> SchedulerClient:
        terms = self.world.register(self.instance, self.identity, self.chunk_tokens)
        scheduler = SchedulerClient(
            self.socket,
            terms,
            readers=self.world.readers,
            lookup_budget_s=PATIENCE_S,
            reserve_wait_s=PATIENCE_S,
            step_wait_s=PATIENCE_S,
        )
        scheduler.start()
        return scheduler

    def wait_connected(self) -> None:
        """Wait until the scheduler and all living ranks are registered. Raises ``Unavailable``."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not all(client.connected for client in self._living()):
            if time.monotonic() > deadline_s:
                raise Unavailable(f"{self.instance} is not registered after {PATIENCE_S:g} s")
            time.sleep(0.001)

    def _living(self) -> list[Endpoint]:
        every: list[Endpoint] = [self.scheduler, *(rank.client for rank in self.ranks)]
        return [client for client in every if not client.closed]

    # ------------------------------------------------------------ whole requests

    def index(self, prompt: Sequence[int], space: bytes = b"") -> None:
        """Index the chunks of ``prompt`` that are stored, or being stored, so that ``find`` finds
        them."""
        keys = b"".join(chunk_keys(prompt, self.chunk_tokens))
        tokens = np.array(prompt, "<u4")[: len(keys) // WIDTH * self.chunk_tokens]
        client = SegmentClient(self.scheduler, self.chunk_tokens)
        assert client.index_chunks(space, keys, WIDTH, tokens.tobytes())
        self.scheduler.call(Ping(), PATIENCE_S)

    def find(self, prompt: Sequence[int], space: bytes = b"", first: int = 0) -> Segments:
        """The segments of ``prompt`` from token ``first`` on."""
        client, tokens = SegmentClient(self.scheduler, self.chunk_tokens), np.array(prompt, "<u4")
        request, prompt_bytes = f"{next(self._requests)}", tokens.tobytes()
        while True:
            self.scheduler.new_step()
            found = client.find_segments(request, space, prompt_bytes, WIDTH, first)
            if not isinstance(found, Pending):
                return found

    def store(self, prompt: Sequence[int]) -> int:
        """Compute ``prompt``, and store its missing chunks. Returns how many were stored."""
        return self._whole(self.reserve(prompt))

    def load(self, prompt: Sequence[int]) -> int:
        """Load the longest cached prefix of ``prompt``. Returns how many chunks every rank
        loaded."""
        return self._whole(self.match(prompt))

    def load_keys(self, keys: list[bytes]) -> int:
        """Load the chunks of a prefix and of segments by their keys, as ``load`` does."""
        return self._whole(self.match_keys(keys))

    def _whole(self, what: Transfer | None) -> int:
        if what is None:
            return 0
        if not self.hand_over(what):
            self.give_back(what)
            return 0
        self.copy(what)
        return self.wait(what)

    def verify(self) -> int:
        """Check every page that was loaded since the last call. Returns how many there were.

        Raises ``WrongPageError`` for a wrong page. Ranks that are dead are skipped.
        """
        right = 0
        for what, ranks in self._loaded:
            for rank in ranks:
                if rank.alive:
                    right += rank.memory.verify(what.keys, what.moving)
            self._give_blocks(what.tables)
        self._loaded.clear()
        return right

    # ------------------------------------------------------------ step by step

    def reserve(self, prompt: Sequence[int]) -> Transfer | None:
        """Compute ``prompt`` on all ranks, and reserve its missing chunks. None if none is
        granted."""
        keys = chunk_keys(prompt, self.chunk_tokens)
        every = (1 << len(self.layouts[0].groups)) - 1
        item = ReserveItem(
            f"{next(self._requests)}",
            b"".join(keys),
            groups=every,
            tenant=self.tenant,
            session=self.session,
        )
        self.scheduler.new_step()
        granted = self.scheduler.reserve([item], WIDTH)
        if granted is None or not granted.grants[0].reservation:
            return None
        grant = granted.grants[0]
        wanted = [keys[chunk] for chunk in grant.chunks]
        places = {chunk: place for place, chunk in enumerate(grant.chunks)}
        which = tuple(tuple(places[chunk] for chunk in rows) for rows in grant.rows())
        what = Transfer(
            "store",
            grant.reservation,
            granted.boot,
            granted.given_s,
            granted.deadline_s,
            wanted,
            grant.slots,
            self._take_blocks(len(wanted)),
            self.world.writers,
            which,
        )
        for rank in self.ranks:
            rank.memory.compute(wanted, what.tables)
        return what

    def match(self, prompt: Sequence[int]) -> Transfer | None:
        """Look up ``prompt``, and take blocks for the hit. None if there is no hit."""
        return self.match_keys(chunk_keys(prompt, self.chunk_tokens))

    def match_keys(self, keys: list[bytes]) -> Transfer | None:
        """Look up chunks by their keys: those of a prefix, or of a prefix and of segments."""
        request = f"{next(self._requests)}"
        self.scheduler.new_step()
        digests = b"".join(keys)
        context = RequestContext(
            tenant=self.tenant, session=self.session, prefill_tokens_s=SLOW_TOKENS_S
        )
        while (found := self.scheduler.match(request, digests, WIDTH, 0, context)) is PENDING:
            time.sleep(0.001)
            self.scheduler.new_step()
        if not isinstance(found, Match):
            self.scheduler.give_back(request)
            return None
        self.scheduler.take(request)
        what = Transfer(
            "load",
            found.lease,
            found.boot,
            found.given_s,
            found.deadline_s,
            keys[: found.chunks],
            found.slots,
            self._take_blocks(found.chunks),
            self.world.readers,
            tuple(tuple(range(found.chunks - len(rows), found.chunks)) for rows in found.slots),
        )
        for rank in self.ranks:
            rank.memory.wipe(what.tables)
        return what

    def hand_over(self, *what: Transfer) -> bool:
        """Tell the daemon that the step's metadata is built, so that only the ranks settle from now
        on. False if that failed."""
        leases = [one.id for one in what if one.kind == "load"]
        reservations = [one.id for one in what if one.kind == "store"]
        return self.scheduler.handed_over(leases, reservations, what[0].boot)

    def give_back(self, what: Transfer) -> None:
        """Settle a transfer that was not handed over, in the scheduler."""
        if what.kind == "load":
            self.scheduler.release(what.boot, what.id)
        else:
            self.scheduler.abort(what.boot, what.id)
        self._give_blocks(what.tables)

    def copy(self, what: Transfer, ranks: Iterable[int] | None = None) -> None:
        """Start the copies of ``ranks``, by default of all ranks that take part."""
        for rank in what.ranks if ranks is None else ranks:
            self.ranks[rank].copy(what)

    def wait(self, what: Transfer) -> int:
        """Wait for all ranks. Returns how many chunks were copied: all or none."""
        self.wait_ranks(what, what.ranks)
        if what.kind == "load" and what.whole:
            self._loaded.append((what, [self.ranks[rank] for rank in what.ranks]))
        else:
            self._give_blocks(what.tables)
        return len(what.keys) if what.whole else 0

    def wait_ranks(self, what: Transfer, ranks: Iterable[int]) -> None:
        """Wait until the copies of ``ranks`` have ended, and the daemon has read their reports.

        Raises ``Unavailable`` after ``PATIENCE_S``.
        """
        names = set(ranks)
        for rank in names:
            if not self.ranks[rank].alive:
                what.report(rank, "dead")
        with what.changed:
            if not what.changed.wait_for(lambda: names <= what.outcomes.keys(), PATIENCE_S):
                raise Unavailable(f"a {what.kind} is not over: {what.outcomes}")
        self.flush(names)

    def flush(self, ranks: Iterable[int]) -> None:
        """Wait until the daemon has handled all messages of ``ranks``."""
        for rank in ranks:
            if self.ranks[rank].alive:
                self.ranks[rank].client.call(Ping(), PATIENCE_S)

    # ------------------------------------------------------------ processes end

    def kill(self, rank: int) -> None:
        """End a rank, or the scheduler (``SCHEDULER``), as SIGKILL does."""
        if rank == SCHEDULER:
            hang_up(self.scheduler)
        else:
            self.ranks[rank].kill()

    def revive(self, rank: int) -> None:
        """Start a rank or the scheduler again, with empty memory, and wait until it is
        registered."""
        if rank == SCHEDULER:
            self.scheduler = self._new_scheduler()
        else:
            self.ranks[rank] = self._new_rank(rank)
        self.wait_connected()

    def close(self) -> None:
        """End the copies, then the connections."""
        for rank in self.ranks:
            if rank.alive:
                rank.close()
        self.scheduler.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ blocks

    def _take_blocks(self, chunks: int) -> tuple[I64Array, ...]:
        """Block ids for ``chunks`` chunks in every group."""
        tables = []
        for number, group in enumerate(self.layouts[0].groups):
            each = group.row_blocks(self.chunk_tokens)
            if chunks * each > len(self._free[number]):
                raise UsageError(
                    f"group {number} has {len(self._free[number])} blocks left: verify"
                )
            ids, self._free[number] = np.split(self._free[number], [chunks * each])
            tables.append(ids.reshape(chunks, each))
        return tuple(tables)

    def _give_blocks(self, tables: tuple[I64Array, ...]) -> None:
        for number, table in enumerate(tables):
            self._free[number] = np.concatenate([self._free[number], table.reshape(-1)])
