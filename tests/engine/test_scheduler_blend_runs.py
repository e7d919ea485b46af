"""Random runs of vLLM's real scheduler with blended requests, and a model of its memory: what is in
each slot of each block, and whether it is what a full prefill puts there."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from vllm.v1.request import Request

from kvass.client.lookups import Found, Match
from kvass.connectors.vllm import blend_planner
from kvass.connectors.vllm.blend_pages import Placement
from kvass.connectors.vllm.blend_planner import BlendPlanner
from tests.engine.test_scheduler_blend import FakeSegments, configs
from tests.support.vllm.fake_client import FakeClient, split
from tests.support.vllm.instruments import BlendControls
from tests.support.vllm.scheduler import BLOCK, CHUNK, SchedulerHarness, before

pytestmark = pytest.mark.skipif(
    before("0.32") or not before("0.33"), reason="blend is for vLLM 0.32 alone"
)

Key = tuple[str | None, tuple[int, ...]]
"""A salt, and a text that ends with the token in a slot."""


@dataclass(frozen=True)
class Slot:
    """KV of ``token`` at ``position``. ``key``: it is exact; None: it is not."""

    token: int
    position: int
    key: Key | None


class Client(FakeClient):
    """``digests``: by lease, those of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.digests: dict[int, list[bytes]] = {}

    def look_up(
        self, request: str, digests: bytes, width: int, first: int, *args: Any, **use: Any
    ) -> Found:
        found = super().look_up(request, digests, width, first, *args, **use)
        if isinstance(match := found.match, Match):
            self.digests[match.lease] = split(digests, width)[match.first : match.chunks]
        return found


class Memory:
    """The blocks of an engine, and its ranks' part of loads and stores."""

    def __init__(self, client: Client, world: SchedulerHarness, rng: random.Random) -> None:
        self.client, self.world, self.rng = client, world, rng
        self.slots: dict[tuple[int, int], Slot | None] = {}
        self.rows: dict[bytes, list[Slot | None]] = {}
        self.texts: dict[bytes, Key] = {}
        """By hash of a block: what it stands for, unless a request made the hash up."""
        self.loads: dict[str, Any] = {}
        self.placements: dict[str, Placement] = {}
        self.ended: dict[str, bool] = {}
        self.blends = self.stores = 0

    def step(self) -> None:
        """Schedule, check all that is read, cached or stored, and end some loads."""
        for request in self.world.scheduler.requests.values():
            self._note(request)
        output, work = self.world.schedule()
        self.loads |= {load.request: load for load in work.loads}
        self.placements |= {one.request: one for one in work.placements}
        cached = output.scheduled_cached_reqs
        begins = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        begins |= {one.req_id: one.num_computed_tokens for one in output.scheduled_new_reqs}
        for name, tokens in output.num_scheduled_tokens.items():
            self._compute(name, begins[name], tokens)
        for block in self.world.pool.blocks:
            if block.block_hash is not None and (key := self.texts.get(block.block_hash[:32])):
                self._check(key, self._read([block.block_id]))
        for store in work.stores:
            size = CHUNK // BLOCK
            for at, digest in enumerate(self.client.writing[store.reservation]):
                row = self._read(store.blocks[0][at * size : (at + 1) * size])
                self._check(self.texts[digest], row)
                self.rows[digest], self.stores = row, self.stores + 1
        self.client.commit([store.reservation for store in work.stores])
        good, bad = self._end_loads()
        token = (self.rng.randrange(50),)
        reported = list(self.world.open_steps)
        self.world.finish(output, reported=reported, received=good, failed=bad, tokens=token)

    def _note(self, request: Any) -> None:
        ids, salt = request.all_token_ids, request.cache_salt
        params, hasher = request.sampling_params, self.world._hasher
        exact = Request("exact", list(ids), params, None, cache_salt=salt, block_hasher=hasher)
        for at, digest in enumerate(exact.block_hashes):
            self.texts[digest] = salt, tuple(ids[: (at + 1) * BLOCK])

    def _read(self, blocks: Any) -> list[Slot | None]:
        return [self.slots.get((block, at)) for block in blocks for at in range(BLOCK)]

    def _write(self, blocks: Any, row: list[Slot | None]) -> None:
        for at, slot in enumerate(row):
            self.slots[blocks[at // BLOCK], at % BLOCK] = slot

    def _check(self, key: Key, row: list[Slot | None]) -> None:
        salt, text = key
        for end, slot in enumerate(row, len(text) - len(row) + 1):
            assert slot is not None
            assert slot.key == (salt, text[:end])

    def _compute(self, name: str, begin: int, tokens: int) -> None:
        request = self.world.scheduler.requests[name]
        (table,) = self.world.scheduler.kv_cache_manager.get_block_ids(name)
        ids, exact = tuple(request.all_token_ids), True
        for at, slot in enumerate(self._read(table)[:begin]):
            assert slot is not None
            assert (slot.token, slot.position) == (ids[at], at)
            exact = exact and slot.key == (request.cache_salt, ids[: at + 1])
        for at in range(begin, begin + tokens):
            key = (request.cache_salt, ids[: at + 1]) if exact else None
            self.slots[table[at // BLOCK], at % BLOCK] = Slot(ids[at], at, key)

    def _end_loads(self) -> tuple[set[str], set[str]]:
        ended, waiting = dict[str, bool](), {n for p in self.placements.values() for n in p.loads}
        for name in [name for name in self.loads if self.rng.random() < 0.5]:
            load = self.loads.pop(name)
            good = load.lease != 0 and self.rng.random() < 0.95
            (self.ended if name in waiting else ended)[name] = good
            if load.lease:
                row = [slot for one in self.client.digests[load.lease] for slot in self.rows[one]]
                row = row[load.skip[0] * BLOCK :]
                self._write(load.blocks[0][load.skip[0] :], row if good else [None] * len(row))
        for name, one in list(self.placements.items()):
            if all(load in self.ended for load in one.loads):
                del self.placements[name]
                ended[name] = {True} == {self.ended.pop(load) for load in one.loads}
                if ended[name]:
                    self._place(one)
        return {n for n in ended if ended[n]}, {n for n in ended if not ended[n]}

    def _place(self, one: Placement) -> None:
        rows = [(span, self._read(span.blocks)) for span in one.spans]
        for span, row in rows:
            for at, slot in enumerate(row):
                assert slot is not None
                assert slot.position == span.old + at
                where = one.table[(span.new + at) // BLOCK], (span.new + at) % BLOCK
                self.slots[where] = Slot(slot.token, span.new + at, None)
        self.blends += 1


def prompt(rng: random.Random, documents: list[list[int]]) -> list[int]:
    """A document alone, or some after one another, with other tokens between them."""
    if rng.random() < 0.4:
        return rng.choice(documents)
    text = [rng.randrange(50, 99) for _ in range(rng.randrange(60))]
    for _ in range(rng.randrange(1, 4)):
        text += rng.choice(documents)
        text += [rng.randrange(50, 99) for _ in range(rng.randrange(20))]
    return text


def at_times(call: Callable[..., int], rng: random.Random) -> Callable[..., int]:
    """``call``, which may raise before or after."""

    def may_raise(*args: Any) -> int:
        fails = rng.random()
        assert fails > 0.01
        answer = call(*args)
        assert fails < 0.99
        return answer

    return may_raise


@pytest.mark.parametrize("seed", range(12))
def test_no_run_leaves_blended_kv_where_exact_kv_belongs(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(blend_planner, "SegmentClient", FakeSegments)
    blocks, batched = rng.choice([40, 64, 200]), rng.choice([16, 48, 512])
    select = rng.choice(["none", "first_k:8", "all"])
    config, caches = configs(select, blocks=blocks, batched=batched)
    config.scheduler_config.policy = rng.choice(["fcfs", "priority"])
    client = Client()
    world = SchedulerHarness(client, configs=(config, caches))
    if seed % 3 == 0:
        world.tolerant = True
        for name in BlendControls.ASKED:
            monkeypatch.setattr(BlendPlanner, name, at_times(getattr(BlendPlanner, name), rng))
    memory = Memory(client, world, rng)
    sizes = [32, 40, 64, 96, 130]
    documents = [[rng.randrange(50) for _ in range(size)] for size in sizes]
    for number in range(30):
        tokens, salt = prompt(rng, documents), rng.choice([None, None, None, "salt"])
        if len(tokens) + 40 < (blocks - 2) * BLOCK:
            request = world.add(str(number), tokens, max_tokens=rng.choice([1, 4, 30]), salt=salt)
            request.priority = rng.randrange(3)
        for _ in range(rng.randrange(12)):
            memory.step()
        if world.scheduler.requests and rng.random() < 0.2:
            world.abort(rng.choice(list(world.scheduler.requests)))
        states = {request.status.name for request in world.scheduler.requests.values()}
        if rng.random() < 0.2 and "WAITING_FOR_REMOTE_KVS" not in states:
            world.scheduler.reset_prefix_cache()
    for _ in range(1000):
        if not world.scheduler.has_requests():
            break
        memory.step()
    assert not world.scheduler.requests
    assert memory.stores > 10
    assert memory.blends
