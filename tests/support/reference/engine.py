"""A reference engine over the core: random layer groups; every loaded page is checked by content.

A run is a function of its seed. The content of a page follows from its group, layer, shard and the
tokens up to its end, so a page of the wrong token range, group, layer or rank is noticed. Blocks
are managed as in vLLM: one id space for all groups, pages of different groups share a block's
memory, blocks that leave a window are freed (and overwritten) after the step, id 0 stands for a
freed block. The simulator runs one of these for every seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from typing import Any, Final, Literal

import numpy as np

from kvass import messages as m
from kvass.client.parallel import ParallelStrategy
from kvass.core.effects import Effect, Event, Opened, Received, Send, ToTier
from kvass.core.machine import CacheMachine, CoreConfig
from kvass.kinds import KINDS, GroupKind
from kvass.layout.spans import Spans
from kvass.types import SCHEDULER, GroupLayout, Limits, RankLayout, Slots, chunk_blocks
from tests.support.reference.memory import BLOCKS, RankPages
from tests.support.reference.reads import read_next
from tests.support.reference.tier import ReferenceTier

WIDTH: Final = 16
MAX_TOKENS: Final = 120


@dataclass(eq=False)
class Request:
    """``prefixes[n]``: the digest of its first n tokens. ``tables[g]``: block ids by group."""

    prefixes: list[bytes]
    tables: list[list[int]]
    computed: int = 0
    offered: int = 0
    owned: set[int] = field(default_factory=set)


class ReferenceEngine:
    """One instance: its block pool, its ranks' memory, its connections."""

    def __init__(self, world: Reference, name: str) -> None:
        self.world, self.name = world, name
        self.free = list(range(1, BLOCKS))
        world.rng.shuffle(self.free)
        self.memories = [
            RankPages(world.rng, layout, shard, world.chunk)
            for shard, layout in enumerate(world.layouts)
        ]
        self.connections = self.connect()

    def connect(self) -> dict[int, int]:
        """A connection for every process."""
        ranks = SCHEDULER, *self.world.strategy.readers
        return {rank: self.world.open(self.name, rank) for rank in ranks}

    # ------------------------------------------------------------ blocks

    def _take(self, request: Request) -> int:
        block = self.free.pop()
        request.owned.add(block)
        return block

    def _give(self, request: Request, block: int) -> None:
        if block:
            request.owned.discard(block)
            for memory in self.memories:
                memory.scribble(block)
            self.free.insert(0, block)

    def _grow(self, request: Request, tokens: int, fresh: bool) -> None:
        """Add blocks up to ``tokens``; if ``fresh``, none for what no later token reads."""
        for table, one in zip(request.tables, self.world.groups, strict=True):
            first = one.needs(tokens) // one.block_tokens if fresh or one.kind == "state" else 0
            for number in range(len(table), len(one.blocks(0, tokens))):
                table.append(self._take(request) if number >= first else 0)

    def _shed(self, request: Request) -> None:
        """After a step: free the blocks that no later token reads."""
        for table, one in zip(request.tables, self.world.groups, strict=True):
            for number in range(one.needs(request.computed) // one.block_tokens):
                if number < len(table) and table[number]:
                    self._give(request, table[number])
                    table[number] = 0

    def end(self, request: Request) -> None:
        """Free all blocks of a request."""
        for block in list(request.owned):
            self._give(request, block)

    # ------------------------------------------------------------ requests

    def begin(self, tokens: Sequence[int], local: int) -> Request:
        """A request whose first ``local`` tokens are in the engine's own prefix cache."""
        digest, prefixes = b"", [b""]
        for token in tokens:
            digest = blake2b(digest + token.to_bytes(2, "little"), digest_size=WIDTH).digest()
            prefixes.append(digest)
        request = Request(prefixes, [[] for _ in self.world.groups])
        if local:
            self._grow(request, local, fresh=True)
            request.computed = local
            self._write(request, 0, local)
        return request

    def _written(self, request: Request, begin: int, end: int) -> Iterator[tuple[int, int, bytes]]:
        """Group, block and prefix of every block that computing tokens ``[begin, end)`` fills."""
        for group, one in enumerate(self.world.groups):
            table = request.tables[group]
            if one.kind == "state":
                whole = [(len(one.blocks(0, end)) - 1, end)]
            else:
                size = one.block_tokens
                whole = [(n, (n + 1) * size) for n in range(begin // size, end // size)]
            for number, upto in whole:
                if table[number]:
                    yield group, table[number], request.prefixes[upto]

    def _write(self, request: Request, begin: int, end: int) -> None:
        for group, block, prefix in self._written(request, begin, end):
            for memory in self.memories:
                memory.write(group, block, prefix)

    def step(self, request: Request, tokens: int) -> None:
        """Compute so many tokens, store the chunks that are now complete, free what is not read."""
        begin, end = request.computed, request.computed + tokens
        for group, one in enumerate(self.world.groups):
            if one.kind == "state" and begin % one.block_tokens:
                table, number = request.tables[group], begin // one.block_tokens
                old, table[number] = (
                    table[number],
                    self._take(request),
                )  # states are not overwritten
                self._give(request, old)
        self._grow(request, end, fresh=False)
        self._write(request, begin, end)
        request.computed = end
        self._store(request)
        self._shed(request)

    def _store(self, request: Request) -> None:
        world, chunk = self.world, self.world.chunk
        ready = min(request.computed // chunk, world.spans.covered(request.tables))
        states = {}
        if request.computed % chunk == 0:
            for group, one in enumerate(world.groups):
                if one.kind == "state":
                    states[group, ready - 1] = request.tables[group][-1]
        tables: list[list[int]] = request.tables
        runs = world.spans.runs(tables, states, request.offered, ready)
        each = world.chunk_blocks
        tail = request.computed * each // world.chunk
        if each and tail % each and tail // each == ready and world.rng.random() < 0.5:
            tables = [ids[:tail] for ids in tables]
            if not runs:
                runs = [(ready, ready, (1 << len(tables)) - 1)]
        else:
            tail = 0
        items = []
        for begin, end, mask in runs:
            item = m.ReserveItem("r", b"".join(self._keys(request, end)), begin, mask)
            if each:
                last = tail if end == ready and tail else end * each
                item.blocks = self._blocks(request, begin * each, last)
            items.append(item)
        request.offered = max(request.offered, ready)
        if not items:
            return
        granted = self.ask(m.Reserve(items=items, width=WIDTH, seq=1))
        assert isinstance(granted, m.Granted), granted
        for item, grant in zip(items, granted.grants, strict=True):
            if grant.reservation:
                blocks = world.spans.to_store(tables, states, item.groups, grant.rows())
                where = iter(grant.slots)
                asked = [item.groups >> g & 1 for g in range(len(world.groups))]
                slots = [next(where) if yes else Slots() for yes in asked]
                self._copy("store", world.strategy.writers, blocks, slots, [0] * len(slots))
                for rank in world.strategy.writers:
                    self.say(
                        rank, m.Commit(boot=world.boot, reservation=grant.reservation, rank=rank)
                    )

    def load(self, request: Request) -> int:
        """Look up the rest of a request, load and check it; returns the tokens it has then."""
        world, chunk, local = self.world, self.world.chunk, request.computed
        last = len(request.prefixes) - 1
        chunks = last // chunk if world.all_full or world.spare else (last - 1) // chunk
        first = local // chunk
        if chunks - world.spare <= first and not world.chunk_blocks:
            return local
        found = self._look_up(request, chunks, first)
        if first < found.chunks < chunks and world.chunk_blocks:
            self._give_back(found)
            found = self._look_up(request, found.chunks, first)
        tokens = found.chunks * chunk
        tokens += found.blocks * chunk // max(1, world.chunk_blocks)
        if not found.lease or tokens <= local:
            self._give_back(found)
            return local
        fresh = Request(request.prefixes, [[] for _ in world.groups])
        self._adopt(request, fresh, tokens)
        loads = world.spans.to_load(fresh.tables, local, first, tokens, list(map(len, found.slots)))
        assert loads is not None, f"{found} is not what a hit of {tokens} tokens needs"
        self._copy("load", world.strategy.readers, *loads[:1], found.slots, loads[1])
        for rank in world.strategy.readers:
            self.say(rank, m.Release(boot=world.boot, lease=found.lease, rank=rank))
        request.tables, request.owned = fresh.tables, fresh.owned
        request.computed, request.offered = tokens, found.chunks if not first else 0
        self.verify(request)
        return tokens

    def _look_up(self, request: Request, chunks: int, first: int) -> m.Matched:
        """Ask for so many chunks, and for the blocks of the next that lie before the last token."""
        world, keys = self.world, b"".join(self._keys(request, chunks))
        asked = m.Lookup("r", keys, WIDTH, first, world.strategy.readers, world.spare, seq=1)
        if each := world.chunk_blocks:
            below_last = (len(request.prefixes) - 2) * each // world.chunk
            end = min((chunks + 1) * each - 1, below_last)
            asked.blocks = self._blocks(request, chunks * each, end)
            if first < chunks:
                asked.first_blocks = self._blocks(request, first * each, (first + 1) * each - 1)
        found = self.ask(asked)
        assert isinstance(found, m.Matched), found
        return found

    def _give_back(self, found: m.Matched) -> None:
        if found.lease:
            self.say(SCHEDULER, m.Release(boot=self.world.boot, lease=found.lease))

    def _adopt(self, old: Request, new: Request, tokens: int) -> None:
        """Fill the tables of ``new`` for ``tokens``, with blocks of ``old`` that are still read."""
        for group, one in enumerate(self.world.groups):
            first = one.needs(tokens) // one.block_tokens
            had = old.tables[group]
            for number in range(len(one.blocks(0, tokens))):
                own = had[number] if number < len(had) and one.kind != "state" else 0
                if number < first:
                    new.tables[group].append(0)
                elif own:
                    old.owned.discard(own)
                    new.owned.add(own)
                    new.tables[group].append(own)
                else:
                    new.tables[group].append(self._take(new))
        self.end(old)

    def verify(self, request: Request) -> None:
        """Check every page that the next token reads. Raises ``WrongPageError``."""
        tokens = request.computed
        for group, one in enumerate(self.world.groups):
            for number in sorted({t // one.block_tokens for t in read_next(one, tokens)}):
                upto = tokens if one.kind == "state" else (number + 1) * one.block_tokens
                if upto <= tokens:
                    for memory in self.memories:
                        prefix = request.prefixes[upto]
                        memory.check(group, request.tables[group][number], prefix)

    # ------------------------------------------------------------ the daemon

    def _keys(self, request: Request, chunks: int) -> list[bytes]:
        size = self.world.chunk
        return [request.prefixes[(c + 1) * size] for c in range(chunks)]

    def _blocks(self, request: Request, first: int, end: int) -> bytes:
        """The hashes of blocks ``[first, end)``."""
        size = self.world.groups[0].block_tokens
        return b"".join(request.prefixes[(block + 1) * size] for block in range(first, end))

    def _copy(
        self, kind: Literal["store", "load"], ranks: Sequence[int], blocks: Any, slots: Any,
        skips: Any,
    ) -> None:  # fmt: skip
        for shard in sorted({self.world.strategy.at(rank).shard for rank in ranks}):
            self.memories[shard].copy(kind, self.world.arena, blocks, slots, skips)

    def ask(self, message: Any) -> Any:
        """Send a request of the scheduler; its reply."""
        return self.world.ask(self.connections[SCHEDULER], message)

    def say(self, rank: int, message: Any) -> None:
        """Send a one-way message of a rank."""
        assert not self.world.step(self.connections[rank], message)


class Reference:
    """One seed: a model of random groups, two engines, one core, one arena."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        tp = rng.choice([1, 1, 2])
        self.strategy = ParallelStrategy(tp, 1, rng.choice([1, tp]))
        shapes = self._shapes()
        self.chunk = math.lcm(*(block for _, block, _ in shapes)) * rng.choice([1, 1, 2, 4])
        self.chunk *= 1 if len({*shapes}) > 1 else rng.choice([2, 4])
        self.layouts = [self._layout(shapes) for _ in range(self.strategy.world_size)]
        self.groups = self.layouts[0].groups
        self.all_full = all(one.kind == "full" for one in self.groups)
        self.spare = int(seed % 4 == 3)
        self.chunk_blocks = 0 if self.spare else chunk_blocks(self.groups, self.chunk)
        self.spans = Spans(self.groups, self.chunk)
        row = sum(one.shard_bytes(self.chunk) for layout in self.layouts for one in layout.groups)
        self.arena = np.zeros(row * rng.choice([8, 20, 80]), np.uint8)
        self.tier = ReferenceTier(rng, self.arena, rng.choice([0.0, 0.1])) if seed % 3 else None
        self.retain = rng.random() < 0.5
        self._connections, self._boots = count(1), count(1)
        self.promoted = 0
        self.boot = self._start()
        self.engines = [ReferenceEngine(self, name) for name in ("a", "b")]
        self.loaded = 0

    def _shapes(self) -> list[tuple[GroupKind, int, int]]:
        rng, shapes = self.rng, list[tuple[GroupKind, int, int]]()
        if rng.random() < 0.25:  # hits may end at any block
            return [("full", rng.choice([2, 4, 8]), 0)] * rng.choice([1, 1, 2])
        for number in range(rng.choice([1, 2, 2, 3, 4])):
            kind = rng.choice(list(KINDS)) if number or rng.random() < 0.3 else "full"
            block, window = rng.choice([2, 4, 8, 12]), rng.randint(1, 60)
            shapes.append((kind, block, window * KINDS[kind].windowed))
        return shapes

    def _layout(self, shapes: list[tuple[GroupKind, int, int]]) -> RankLayout:
        groups = []
        for kind, block, window in shapes:
            pages = tuple(self.rng.randint(1, 200) for _ in range(self.rng.choice([1, 2, 3])))
            groups.append(GroupLayout(kind, block, tuple(map(str, pages)), pages, window))
        return RankLayout(tuple(groups))

    # ------------------------------------------------------------ the core

    def _start(self) -> bytes:
        """Start a core whose arena holds old bytes; its boot id."""
        boot = b"reference %06d" % next(self._boots)
        config = CoreConfig(
            boot=boot,
            arena_bytes=len(self.arena),
            limits=Limits(instance_write_share=1.0),
            tiers=() if self.tier is None else ("tier",),
            keep_loaded=self.retain,
        )
        self.machine = CacheMachine(config)
        return boot

    def restart(self) -> None:
        """The daemon is killed and starts again with an empty row store."""
        self.arena[:] = self.rng.randrange(256)
        self.boot = self._start()
        for engine in self.engines:
            engine.connections = engine.connect()

    def _step(self, event: Event) -> list[Effect]:
        """The effects of an event, and of the tier's answers to them."""
        effects = self.machine.step(event, 100.0)
        self.machine.validate()
        for effect in list(effects):
            if isinstance(effect, ToTier):
                assert self.tier is not None
                effects += self._step(self.tier.perform(effect))
        return effects

    def step(self, connection: int, message: Any) -> list[Any]:
        """The messages that the core sends to the connection."""
        effects = self._step(Received(connection, message))
        return [e.message for e in effects if isinstance(e, Send) and e.connection == connection]

    def ask(self, connection: int, message: Any) -> Any:
        """The only reply, which may come after a ``Promoting``."""
        (reply,) = [r for r in self.step(connection, message) if not isinstance(r, m.Promoting)]
        return reply

    def open(self, name: str, rank: int) -> int:
        """A registered connection."""
        connection = next(self._connections)
        self._step(Opened(connection))
        self.ask(connection, m.Hello(seq=1, clock_s=100.0))
        mine = self.strategy.at(rank)
        layout = None if rank == SCHEDULER else self.layouts[mine.shard]
        told = mine.register(name, {"model": "m"}, self.chunk, layout)
        told.seq = 2
        reply = self.ask(connection, told)
        assert isinstance(reply, m.Registered), reply
        return connection

    # ------------------------------------------------------------ histories

    def run(self, requests: int = 10) -> None:
        """Run requests that share prefixes on both engines. Raises ``WrongPageError``."""
        rng = self.rng
        trunks = [[rng.randrange(9) for _ in range(MAX_TOKENS)] for _ in range(2)]
        for _ in range(requests):
            if self.tier is not None and rng.random() < 0.2:
                self.restart()
            engine = rng.choice(self.engines)
            tokens = list(rng.choice(trunks)[: rng.randint(1, MAX_TOKENS)])
            tokens += [rng.randrange(9) for _ in range(rng.choice([0, 1, 30]))]
            unit = math.lcm(*(one.block_tokens for one in self.groups))
            local = rng.choice([0, 0, rng.randint(0, len(tokens) - 1) // unit * unit])
            request = engine.begin(tokens, local)
            before = self.machine.status()["counters"].get("promoted_chunks", 0)
            self.loaded += engine.load(request) > local
            self.promoted += self.machine.status()["counters"].get("promoted_chunks", 0) - before
            while request.computed < len(tokens):
                left = len(tokens) - request.computed
                engine.step(request, min(left, self._tokens(request)))
            engine.end(request)
        status = self.machine.status()
        assert [status[name] for name in ("pins", "leases", "reservations")] == [0, 0, 0]

    def _tokens(self, request: Request) -> int:
        """Tokens of a step; with state groups a long step ends at a block boundary, as in vLLM."""
        tokens = self.rng.choice([1, 3, 17, 40, 200])
        sizes = [one.block_tokens for one in self.groups if one.kind == "state"]
        if sizes:
            end = (request.computed + tokens) // max(sizes) * max(sizes)
            tokens = end - request.computed if end > request.computed else tokens
        return tokens


def run_reference(seed: int) -> Reference:
    """Run one seed to its end."""
    world = Reference(seed)
    world.run()
    return world
