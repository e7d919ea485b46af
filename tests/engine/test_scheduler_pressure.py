"""vLLM's real schedulers under pressure: whatever happens, some request goes on.

Tiny pools, lookups that are pending, loads that take steps or fail, stores that hold blocks,
preemptions and aborts. What a request waits for ends within a few steps here, so ``IDLE`` steps in
a row that compute nothing, while requests are unfinished, are a deadlock.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from functools import partial
from typing import Any, Final

import pytest

from tests.support.vllm.fake_client import FakeClient
from tests.support.vllm.scheduler import (
    BLOCK,
    FIXED,
    SchedulerHarness,
    make_configs,
    make_multi_configs,
)

IDLE: Final = 200
REQUESTS: Final = 24
TEXTS: Final = 3
"""Prompts are beginnings of so many texts, some with an end of their own."""


class Restless(FakeClient):
    """A daemon that has some lookups wait, and answers reserves late, or never."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__(tails=draw.random() < 0.5)
        self._draw = draw
        self.late = draw.choice([0, 0, 1, 3])
        self.silent = draw.random() < 0.1

    def match(self, *args: Any, **kwargs: Any) -> Any:
        self.pending = int(self._draw.random() < 0.5)
        return super().match(*args, **kwargs)


class World:
    """One engine under pressure; everything is drawn from ``seed``. With ``others`` it has one more
    connector that loads."""

    def __init__(self, seed: int, asynchronous: bool, policy: str, others: int = 0) -> None:
        self.draw = random.Random(f"{seed} {asynchronous} {policy}")
        self.client = Restless(self.draw)
        self.blocks = self.draw.randint(16, 40)
        make = partial(make_multi_configs, FIXED, others=others) if others else make_configs
        configs = make(blocks=self.blocks, batched=self.draw.choice([48, 512]))
        configs[0].scheduler_config.policy = policy
        self.world = SchedulerHarness(self.client, asynchronous=asynchronous, configs=configs)
        self.depth = int(asynchronous)
        """Steps that are planned before the answer to one is there."""
        self.steps = deque[Any]()
        self.now = self.added = 0
        self.loads: dict[str, tuple[int, bool]] = {}
        self.stores: dict[int, int] = {}
        """When loads end, and whether they fail; when stores are reported."""
        self.seen = Counter[str]()

    def add(self) -> None:
        """A request that the pool has room for, if no other needs it."""
        draw, most = self.draw, (self.blocks - 2) * BLOCK
        answer = draw.randint(1, 40)
        shared = draw.randint(1, most - answer)
        own = draw.choice([0, 0, draw.randint(0, most - answer - shared)])
        text = 10_000 * draw.randrange(TEXTS)
        ours = range(text + 5_000 + self.added * 400, text + 5_000 + self.added * 400 + own)
        name = f"r{self.added}"
        tokens = [*range(text, text + shared), *ours]
        self.world.add(name, tokens, max_tokens=answer, priority=draw.randrange(3))
        self.added += 1

    def step(self) -> bool:
        """Plan one step, and give an answer to one; whether the engine computes something."""
        output, work = self.world.schedule()
        for name, request in self.world.scheduler.requests.items():
            loads = request.status.name == "WAITING_FOR_REMOTE_KVS" and name not in self.loads
            if loads and name not in self.world.scheduler.finished_recving_kv_req_ids:
                self.loads[name] = self.now + self.draw.randint(0, 6), self.draw.random() < 0.2
                self.seen["loads"] += 1
        if work.step:
            self.stores[work.step] = self.now + self.draw.randint(0, 6)
            self.client.commit(store.reservation for store in work.stores)
        self.seen["preempted"] += len(output.preempted_req_ids or ())
        self.steps.append(output)
        if len(self.steps) > self.depth:
            self.finish(self.steps.popleft())
        self.now += 1
        return any(output.num_scheduled_tokens for output in (output, *self.steps))

    def finish(self, output: Any) -> None:
        ended = {name: fails for name, (when, fails) in self.loads.items() if when <= self.now}
        settled = [step for step, when in self.stores.items() if when <= self.now]
        self.loads = {name: load for name, load in self.loads.items() if name not in ended}
        self.stores = {step: when for step, when in self.stores.items() if step not in settled}
        failed = [name for name, fails in ended.items() if fails]
        self.seen["failed"] += len(failed)
        self.world.finish(output, reported=settled, received=ended, failed=failed)

    def abort(self) -> None:
        """End a request that has not ended."""
        live = [r.request_id for r in self.world.scheduler.requests.values() if not r.is_finished()]
        if live:
            self.world.abort(self.draw.choice(live))
            self.seen["aborts"] += 1

    def run(self) -> None:
        """Until all requests have ended and everything was given back."""
        scheduler, idle = self.world.scheduler, 0
        while self.added < REQUESTS or scheduler.has_requests():
            while self.added < REQUESTS and self.draw.random() < 0.2:
                self.add()
            if self.draw.random() < 0.02:
                self.abort()
            idle = 0 if self.step() or not scheduler.has_unfinished_requests() else idle + 1
            assert idle < IDLE, {name: str(r.status) for name, r in scheduler.requests.items()}
            assert self.now < 100 * IDLE, "it never ends"
        for output in self.steps:
            self.finish(output)
        assert not self.client.held
        assert not self.client.taken
        assert self.world.free_blocks == self.world.pool.num_gpu_blocks - 1


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_some_request_always_goes_on(asynchronous: bool, policy: str) -> None:
    """In every second world another connector loads, too."""
    seen = Counter[str]()
    for seed in range(12):
        world = World(seed, asynchronous, policy, others=seed % 2)
        try:
            world.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
        seen += world.seen + Counter(pending=len(world.client.lookups) - world.added)
    assert min(seen[name] for name in ("loads", "failed", "preempted", "aborts", "pending")) > 10
