"""vLLM's real scheduler under pressure: tiny pools, and a daemon and workers that take their time.

``Engine`` goes on from a scene that a test has set up. ``World`` draws everything: lookups that are
pending, loads that take steps or fail, stores that hold blocks, preemptions, aborts, drafts that
are accepted or not. What a request waits for ends within a few steps, so ``IDLE`` steps in a row
that compute nothing, while requests are unfinished, are a deadlock.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Collection, Sequence
from typing import Any, Final

import numpy as np

from kvass.client.lookups import Found
from kvass.core.matching.coverage import first_chunk, longest_hit
from kvass.messages import Grant, ReserveItem
from kvass.types import GroupLayout, Slots
from tests.support.vllm.fake_client import FakeClient, slots_of
from tests.support.vllm.hybrid import GroupShape, make_hybrid_configs
from tests.support.vllm.scheduler import CHUNK, FIXED, SchedulerHarness, multi_connector

IDLE: Final = 200
REQUESTS: Final = 48
TEXTS: Final = 3
"""Prompts are beginnings of so many texts, some with an end of their own."""

SHAPES: Final[dict[str, list[GroupShape]]] = {
    "full": [("full", 16, 0, 2)],
    "window": [("sliding_window", 16, 40, 1), ("full", 16, 0, 1)],
    "windows": [
        ("sliding_window", 16, 40, 1),
        ("sliding_window", 16, 70, 1),
        ("full", 16, 0, 1),
    ],
    "state": [("state", 32, 0, 1), ("full", 32, 0, 1)],
}


class GroupClient(FakeClient):
    """A daemon without a process, for models of several layer groups. ``serve`` says which."""

    groups: Sequence[GroupLayout]
    spare: int

    def serve(self, setup: Any) -> None:
        """Serve the engine of this ``VllmSetup``."""
        self.groups, self.spare = setup.groups, setup.spare

    def longest(self, hashes: Sequence[bytes], first: int) -> int:
        there = [
            np.array([_row(group, hash_) in self.rows for hash_ in hashes], np.bool_)
            for group in range(len(self.groups))
        ]
        return longest_hit(self.groups, there, CHUNK, first, self.spare)

    def matched_slots(self, first: int, chunks: int) -> tuple[Slots, ...]:
        begins = (first_chunk(one, chunks, CHUNK, first) for one in self.groups)
        return tuple(slots_of(chunks - begin) for begin in begins)

    def grant_item(self, item: ReserveItem, hashes: Sequence[bytes], busy: set[bytes]) -> Grant:
        wanted = () if self.refuse else range(item.first, len(hashes))
        rows = {
            group: [c for c in wanted if _row(group, hashes[c]) not in busy]
            for group in range(len(self.groups))
            if item.groups >> group & 1
        }
        number = self.write([_row(g, hashes[c]) for g, chunks in rows.items() for c in chunks])
        return Grant(
            number,
            tuple(sorted({c for chunks in rows.values() for c in chunks})),
            tuple(slots_of(len(chunks)) for chunks in rows.values()),
            tuple(map(tuple, rows.values())),
        )


def _row(group: int, hash_: bytes) -> bytes:
    return bytes([group]) + hash_


class Restless(GroupClient):
    """A daemon that has some lookups wait, and answers reserves late, or never."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__(tails=draw.random() < 0.5)
        self._draw = draw
        self.late = draw.choice([0, 0, 1, 3])
        self.silent = draw.random() < 0.1

    def look_up(self, *args: Any, **kwargs: Any) -> Found:
        self.pending = int(self._draw.random() < 0.5)
        return super().look_up(*args, **kwargs)


class Engine:
    """One engine whose blocks are scarce. What takes time takes ``LASTS`` steps. A model of
    ``drafts`` agrees to all that is proposed."""

    LASTS: Final = 3

    def __init__(
        self, client: GroupClient, asynchronous: bool, configs: Any, drafts: int = 0
    ) -> None:
        self.client, self.drafts = client, drafts
        self.world = SchedulerHarness(client, asynchronous=asynchronous, configs=configs)
        client.serve(self.world.planner._setup)
        self.depth = int(asynchronous)
        """Steps that are planned before the answer to one is there."""
        self.steps = deque[Any]()
        self.now = 0
        self.loads: dict[str, tuple[int, bool]] = {}
        self.stores: dict[int, int] = {}
        """When loads end, and whether they fail; when stores are reported."""
        self.failing: Collection[str] = ()
        """Whose loads fail."""
        self.seen = Counter[str]()

    def lasts(self) -> int:
        """How many steps a load or a store takes."""
        return self.LASTS

    def fails(self, name: str) -> bool:
        """Whether the load of a request fails."""
        return name in self.failing

    def agrees(self, proposed: int) -> int:
        """How many of a request's drafts are accepted."""
        return proposed

    def proposes(self) -> int:
        """How many drafts a request gets."""
        return self.drafts

    def comes(self) -> bool:
        """What happens between two steps; whether more requests come."""
        return False

    def step(self) -> bool:
        """Plan one step, and give an answer to one; whether the engine computes something."""
        output, work = self.world.schedule()
        for name, request in self.world.scheduler.requests.items():
            loads = request.status.name == "WAITING_FOR_REMOTE_KVS" and name not in self.loads
            if loads and name not in self.world.scheduler.finished_recving_kv_req_ids:
                self.loads[name] = self.now + self.lasts(), self.fails(name)
                self.seen["loads"] += 1
        if work.step:
            self.stores[work.step] = self.now + self.lasts()
            self.client.commit(store.reservation for store in work.stores)
        self.seen["preempted"] += len(output.preempted_req_ids or ())
        self.steps.append(output)
        if len(self.steps) > self.depth:
            self.finish(self.steps.popleft())
        self.now += 1
        return any(output.num_scheduled_tokens for output in (output, *self.steps))

    def finish(self, output: Any) -> None:
        """Give the answer to a step, with what has ended until now."""
        ended = {name: fails for name, (when, fails) in self.loads.items() if when <= self.now}
        settled = [step for step, when in self.stores.items() if when <= self.now]
        self.loads = {name: load for name, load in self.loads.items() if name not in ended}
        self.stores = {step: when for step, when in self.stores.items() if step not in settled}
        failed = [name for name, fails in ended.items() if fails]
        self.seen["failed"] += len(failed)
        answers = {name: [7] * self.accepted(output, name) for name in output.num_scheduled_tokens}
        self.world.finish(output, tokens=answers, reported=settled, received=ended, failed=failed)
        if self.drafts and not self.depth:  # the asynchronous scheduler plans drafts by itself
            for name in answers.keys() & self.world.scheduler.requests.keys():
                self.world.draft(name, [7] * self.proposes())

    def accepted(self, output: Any, name: str) -> int:
        """How many tokens a request that samples gets: one, and drafts that the model agrees to."""
        proposed = output.scheduled_spec_decode_tokens.get(name, ())
        if not proposed:
            return 1
        agreed = self.agrees(len(proposed))
        self.seen["drafts"] += agreed
        return 1 + agreed

    def run(self) -> None:
        """Until all requests have ended and everything was given back."""
        scheduler, idle = self.world.scheduler, 0
        while self.comes() or scheduler.has_requests():
            idle = 0 if self.step() or not scheduler.has_unfinished_requests() else idle + 1
            assert idle < IDLE, {name: str(r.status) for name, r in scheduler.requests.items()}
            assert self.now < 100 * IDLE, "it never ends"
        while self.steps:
            self.finish(self.steps.popleft())
        assert not self.client.held
        assert not self.client.taken
        assert self.world.free_blocks == self.world.pool.num_gpu_blocks - 1


class World(Engine):
    """One engine under pressure, of layer groups ``shapes``; everything is drawn from ``seed``.
    With ``others`` it has one more connector that loads. An EAGLE model proposes ``drafts``."""

    client: Restless

    def __init__(
        self,
        seed: int,
        asynchronous: bool,
        policy: str,
        shapes: Sequence[GroupShape] = SHAPES["full"],
        others: int = 0,
        drafts: int = 0,
    ) -> None:
        self.draw = random.Random(f"{seed} {asynchronous} {policy}")
        client = Restless(self.draw)
        block = shapes[0][1]
        self.blocks = self.draw.randint(10, 20) * len(shapes) * 16 // block
        configs = make_hybrid_configs(
            {"kvass.chunk_tokens": CHUNK},
            shapes,
            draft_states=drafts,
            drafts=drafts,
            drafter="eagle",
            blocks=self.blocks,
            batched=self.draw.choice([48, 512]),
            **(multi_connector(FIXED, others) if others else {}),
        )
        configs[0].scheduler_config.policy = policy
        super().__init__(client, asynchronous, configs, drafts)
        states = sum(1 + drafts for kind, *_ in shapes if kind == "state")
        self.most = (self.blocks - 2 - states) // len(shapes) * block - 2 * drafts
        """Tokens of a request that the pool has room for, if no other needs it."""
        self.added = 0

    def lasts(self) -> int:
        """Up to six steps."""
        return self.draw.randint(0, 6)

    def fails(self, name: str) -> bool:
        """One in five."""
        return self.draw.random() < 0.2

    def agrees(self, proposed: int) -> int:
        """Any number of them."""
        return self.draw.randint(0, proposed)

    def proposes(self) -> int:
        """Any number."""
        return self.draw.randint(0, self.drafts)

    def comes(self) -> bool:
        """Requests are added and aborted."""
        while self.added < REQUESTS and self.draw.random() < 0.3:
            self.add()
        if self.draw.random() < 0.02:
            self.abort()
        return self.added < REQUESTS

    def add(self) -> None:
        """Add a request."""
        draw = self.draw
        answer = draw.randint(1, 40)
        shared = draw.randint(1, self.most - answer)
        own = draw.choice([0, 0, draw.randint(0, self.most - answer - shared)])
        text = 10_000 * draw.randrange(TEXTS)
        ours = range(text + 5_000 + self.added * 400, text + 5_000 + self.added * 400 + own)
        name = f"r{self.added}"
        tokens = [*range(text, text + shared), *ours]
        self.world.add(name, tokens, max_tokens=answer, priority=draw.randrange(3))
        self.added += 1

    def abort(self) -> None:
        """End a request that has not ended."""
        live = [r.request_id for r in self.world.scheduler.requests.values() if not r.is_finished()]
        if live:
            self.world.abort(self.draw.choice(live))
            self.seen["aborts"] += 1

    def run(self) -> None:
        """All requests."""
        super().run()
        self.seen["pending"] = len(self.client.lookups) - self.added
