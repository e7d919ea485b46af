"""An engine without a model: vLLM's scheduler, and our connector's workers over real torch memory.

Only the forward pass is a stub. The content of a page follows from its shard, its group, its layer
and the tokens up to its end, so a page of the wrong one is noticed: all that a request begins with
is verified. Scheduler, copies, arena, reports and their aggregation over ranks are real.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvass.client.lookups import PENDING
from kvass.client.parallel import ParallelStrategy
from kvass.testing.daemon import Daemon
from tests.support.vllm import instruments
from tests.support.vllm.hybrid import GroupShape, make_hybrid_configs
from tests.support.vllm.lora_ranks import LoraManager
from tests.support.vllm.scheduler import ALONE, CHUNK, SchedulerHarness, make_configs

TIMEOUT_S = 120.0


class StubModelRank:
    """The worker that ``config`` and ``caches`` describe (``make_configs``)."""

    saves_empty_steps = True
    """Whether the runner calls ``wait_for_save`` without a forward pass, as since vLLM 0.31."""

    forward: Callable[[], object] = staticmethod(lambda: None)
    """Called as the forward pass of each step. It may raise."""

    def __init__(self, config: Any, caches: Any) -> None:
        import torch

        self.gate: CopyGate | None = None
        self.speculative = False
        """Whether hooks are called as by vLLM's V1 runner with a drafter (on the last stage)."""
        tensors, groups = caches.kv_cache_tensors, caches.kv_cache_groups
        memory = torch.zeros(tensors[0].size, dtype=torch.uint8)
        self.memory: npt.NDArray[np.uint8] = memory.numpy()
        self.lora = LoraManager()
        self.model_runner = SimpleNamespace(lora_manager=self.lora)  # ``lora.held_adapters``
        self.connector = worker_connector(config, caches)
        self.connector.register_kv_caches(
            {
                name: memory[tensor.offset + i * tensor.layer_stride :]
                for tensor in tensors
                for i, name in enumerate(tensor.layers)
            }
        )

        def find(group: int, layer: int, block: int) -> npt.NDArray[np.uint8]:
            tensor, size = tensors[group], groups[group].kv_cache_spec.page_size_bytes
            at = tensor.offset + layer * tensor.layer_stride + block * tensor.block_stride
            return self.memory[at : at + size]

        self._find: Callable[[int, int, int], npt.NDArray[np.uint8]] = find
        self.layers = [len(tensor.layers) for tensor in tensors]
        """How many each group has in this rank."""

    @classmethod
    def over(cls, connector: Any) -> StubModelRank:
        """The worker of a running engine, in this process."""
        rank = cls.__new__(cls)
        rank.gate, rank.speculative, rank.connector = None, False, connector
        rank._find = lambda group, layer, block: instruments.pages_of(connector, [block], group)[
            layer
        ]
        rank.layers = [len(plane.planes) for plane in rank.copier._planes]
        return rank

    def page(self, group: int, layer: int, block: int) -> npt.NDArray[np.uint8]:
        """The page of a block in a layer of a group; the engine reads and writes it."""
        synchronize(self.connector)
        return self._find(group, layer, block)

    @property
    def copier(self) -> Any:
        """The connector's worker side."""
        return self.connector._copier

    @property
    def shard(self) -> int:
        """Which shard this rank holds."""
        strategy = self.copier.strategy
        return int(strategy.rank // strategy.replicas)

    def run(self, work: Any, forward: bool = True) -> Any:
        """Call one step's hooks as the model runner does, with or without a ``forward`` pass.
        Returns vLLM's ``KVConnectorOutput``."""
        from vllm.v1.outputs import KVConnectorOutput

        deferred = self.speculative and forward
        self.connector.handle_preemptions(work)
        self.connector.bind_connector_metadata(work)
        try:
            self.forward()
        finally:
            self.connector.start_load_kv(None)
            if not deferred and (forward or self.saves_empty_steps):
                self.connector.wait_for_save()
            ended = self.connector.get_transfer_results(set())
            report = self.connector.build_connector_worker_meta()
        if deferred and self.copier.strategy.last_stage:  # after the drafter
            self.connector.wait_for_save()
        if not deferred or self.copier.strategy.last_stage:
            self.connector.clear_connector_metadata()
        return KVConnectorOutput(
            finished_recving=ended.finished_recving,
            failed_recving=ended.failed_recving,
            kv_connector_worker_meta=report,
        )

    def close(self) -> None:
        """As at the engine's end."""
        if self.gate is not None:
            self.gate.open()
        self.connector.shutdown()


def worker_connector(config: Any, caches: Any) -> Any:
    """The worker's half of the connector that ``config`` names."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvass.connectors.vllm.adapt import KVConnectorRole

    kind = KVConnectorFactory.get_connector_class(config.kv_transfer_config)
    return kind(config, KVConnectorRole.WORKER, caches)


def synchronize(connector: Any) -> None:
    """Wait for the fake GPU, if there is one (``fake_gpu_connector``)."""
    getattr(connector, "synchronize", lambda: None)()


class CopyGate:
    """The clock of a rank's copies. While shut, copies stand still; ``ahead_s`` makes them late."""

    def __init__(self, rank: StubModelRank, *, shut: bool = False, ahead_s: float = 0.0) -> None:
        self._open = threading.Event()
        self._ahead_s = ahead_s
        if not shut:
            self.open()
        rank.gate = self
        rank.copier._mover._clock = self

    def __call__(self) -> float:
        if threading.current_thread() is not threading.main_thread():
            assert self._open.wait(TIMEOUT_S), "never opened"
        return time.monotonic() + self._ahead_s

    def open(self) -> None:
        """Let the copies continue."""
        self._open.set()


class Ranks:
    """All workers of an engine, and vLLM's aggregation of their reports."""

    def __init__(self, ranks: Iterable[StubModelRank]) -> None:
        from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator

        self.all = list(ranks)
        self._aggregator = KVOutputAggregator(len(self.all))
        self.report: Any = None
        """Of the last step."""

    def run(self, work: Any, forward: bool = True) -> dict[str, Any]:
        """One step on every rank; returns the arguments for ``SchedulerHarness.finish``."""
        from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

        told = [copy.copy(EMPTY_MODEL_RUNNER_OUTPUT) for _ in self.all]
        for output, rank in zip(told, self.all, strict=True):
            output.kv_connector_output = rank.run(work, forward)
        sums = self._aggregator.aggregate(told)
        assert sums is not None
        sum_ = sums.kv_connector_output
        assert sum_ is not None
        self.report, failed = sum_.kv_connector_worker_meta, sum_.failed_recving
        report = self.report
        return {
            "reported": report.steps if report is not None else {},
            "received": (sum_.finished_recving or set()) - failed,
            "failed": failed,
            "adapters": report.adapters if report is not None else {},
            "wrong": report.wrong if report is not None else [],
        }


class StubModelEngine:
    """A scheduler and the ranks of ``strategy``, on the daemon at ``socket``.

    ``chunk``: the tokens of a chunk. ``shapes``: its layer groups, if not the one of
    ``make_configs``. With ``daemon``, ``generate`` waits until no reservation is open. ``workers``:
    the strategy of the ranks, if it is to contradict the scheduler's. ``more``: further options of
    the connector. What a page holds follows from the ``weights``, too. ``options`` are those of
    ``make_configs``, or of ``make_hybrid_configs``.
    """

    def __init__(
        self,
        socket: str,
        daemon: Daemon | None = None,
        tag: str = "",
        strategy: ParallelStrategy = ALONE,
        workers: ParallelStrategy | None = None,
        chunk: int = CHUNK,
        more: Mapping[str, object] | None = None,
        shapes: Sequence[GroupShape] = (),
        asynchronous: bool = False,
        weights: str = "",
        **options: Any,
    ) -> None:
        extra: dict[str, object] = {"kvass.socket": socket, "kvass.tag": tag, **(more or {})}
        extra["kvass.chunk_tokens"] = chunk
        configs = partial(make_hybrid_configs, shapes=shapes) if shapes else make_configs
        config, caches = configs(extra, strategy=strategy, **options)
        world = SchedulerHarness(None, configs=(config, caches), asynchronous=asynchronous)
        made, workers = [], workers or strategy
        for number in range(workers.ranks):
            more, name = self._node_of(number, config.kv_transfer_config.engine_id)
            theirs, own = configs({**extra, **more}, strategy=workers.at(number), **options)
            theirs.kv_transfer_config.engine_id = name
            made.append(StubModelRank(theirs, own))
        self._begin(world, made, shapes or [("full", world.hash_tokens, 0, 2)])
        self.daemon, self.weights = daemon, weights
        self.client = world.connector._planner.client
        # Long waits: on a loaded machine a slow answer would count as a miss.
        self.client._reserve_wait_s = self.client.step.wait_s = self.client.step.left_s = 5.0
        begin = self.client.begin_reserve
        # Grants come at once, unless ``delay_grants`` says otherwise.
        self.client.begin_reserve = lambda items, width, wait=True: begin(items, width)

    def _node_of(self, rank: int, name: str) -> tuple[Mapping[str, object], str]:
        """More options of a rank, and its engine's name, which is ``name`` in the scheduler."""
        return {}, name

    @classmethod
    def over(cls, core: Any, connector: Any) -> StubModelEngine:
        """Over the ``EngineCore`` of an engine with one rank, which vLLM itself has set up: our
        layout is vLLM's, also where this machine lacks the kernels of the model. It goes on after
        a wrong page."""
        engine, rank = cls.__new__(cls), StubModelRank.over(connector)
        world = SchedulerHarness.over(core.scheduler, core.request_block_hasher)
        groups = zip(world.connector._planner._setup.groups, rank.copier._planes, strict=True)
        shapes = [(g.kind, g.block_tokens, g.window_tokens, len(p.planes)) for g, p in groups]
        engine._begin(world, [rank], shapes)
        engine.daemon, engine.weights, engine.tolerant = None, "", True
        return engine

    def _begin(
        self,
        world: SchedulerHarness,
        ranks: Iterable[StubModelRank],
        shapes: Sequence[GroupShape],
    ) -> None:
        self.world, self.ranks, self.shapes = world, Ranks(ranks), shapes
        # ``step`` looks at the pages before the ranks' hooks
        world.connector._planner.in_step.fits = lambda blocks: False
        self.loads: list[Any] = []
        self.found: dict[str, int] = {}
        """By request that has begun: the tokens that it found cached or loaded."""
        self.wrong, self.tolerant = "", False
        """The first wrong page that a request began with, and whether it goes on after one."""

    @property
    def rank(self) -> StubModelRank:
        """The first rank."""
        return self.ranks.all[0]

    @property
    def copier(self) -> Any:
        """The first rank's worker side."""
        return self.rank.copier

    def wait_connected(self) -> None:
        """Wait for the sessions of the scheduler and of all ranks; with ``daemon``, for sessions of
        its current boot (after a restart, old sessions may not have noticed yet)."""
        clients = [self.client, *(rank.copier._client for rank in self.ranks.all)]

        def here() -> bool:
            boots = {held and held.boot for held in (c.connection for c in clients)}
            return boots == {self.daemon.boot} if self.daemon else None not in boots

        until(here, "the sessions of the scheduler and the ranks")

    def delay_grants(self, steps: Callable[[], int]) -> None:
        """Make each grant come ``steps()`` steps late."""
        client, stores = self.client, self.world.connector._planner.stores
        granted, due = client.granted, dict[int, int]()

        def late(reserving: Any) -> Any:
            now = stores._number
            if now < due.setdefault(reserving.seq, now + steps()):
                return PENDING
            return granted(reserving)

        client.granted = late

    def step(self) -> Any:
        """One step: schedule, verify what a request begins with when it first computes, or first
        computes after a preemption, "compute", run the ranks' hooks."""
        output, work = self.world.schedule()
        self._copy_blocks(output.kv_cache_block_copies or ())
        fresh = {new.req_id for new in output.scheduled_new_reqs}
        fresh |= set(output.scheduled_cached_reqs.resumed_req_ids)
        for name, tokens in output.num_scheduled_tokens.items():
            if name in fresh:
                request = self.world.scheduler.requests[name]
                self.found[name] = request.num_computed_tokens - tokens
                self.verify(request, self.found[name])
            self.compute(name, tokens)
        return self.run_ranks(output, work)

    def _copy_blocks(self, copies: Iterable[Any]) -> None:
        """As vLLM's runner: a request that hits inside a block continues in a copy of it."""
        for one, rank in itertools.product(copies, self.ranks.all):
            for group, layers in enumerate(rank.layers):
                for layer in range(layers):
                    page = rank.page(group, layer, one.src_block_id)
                    rank.page(group, layer, one.dst_block_id)[:] = page

    def run_ranks(self, output: Any, work: Any) -> Any:
        """The rest of a step, after its forward pass; returns ``output``."""
        self.loads += work.loads
        for lora in self.world.loras(output):
            for rank in self.ranks.all:
                rank.lora.use(lora)
        self.world.finish(output, **self.ranks.run(work, bool(output.num_scheduled_tokens)))
        if not output.num_scheduled_tokens:
            time.sleep(0.001)
        return output

    def tables(self, name: str) -> tuple[list[int], ...]:
        """The block ids of a live request, by group."""
        found: tuple[list[int], ...] = self.world.scheduler.kv_cache_manager.get_block_ids(name)
        return found

    def compute(self, name: str, tokens: int) -> None:
        """Write on every rank the pages of the blocks that a step of so many tokens completes, and
        the state at its end; loaded pages are not touched."""
        request = self.world.scheduler.requests[name]
        end = request.num_computed_tokens
        for group, ids in enumerate(self.tables(name)):
            kind, block_tokens, *_ = self.shapes[group]
            if kind == "state":
                wanted = [(-(-end // block_tokens) - 1, end)]
            else:
                numbers = range((end - tokens) // block_tokens, end // block_tokens)
                wanted = [(n, (n + 1) * block_tokens) for n in numbers]
            for number, upto in wanted:
                if number < len(ids) and ids[number]:
                    for _, _, page, said in self._pages(group, ids[number], request, upto):
                        page[:] = said

    def _pages(self, group: int, block: int, request: Any, upto: int) -> Iterator[Any]:
        """Of a block that ends with a request's first ``upto`` tokens: each rank and layer, its
        page, and what that should hold."""
        prefix = f"{self.weights}{list(request.all_token_ids[:upto])}"
        for at, rank in enumerate(self.ranks.all):
            for layer in range(rank.layers[group]):
                page = rank.page(group, layer, block)
                seed = hashlib.sha256(f"{rank.shard}.{group}.{layer}.{prefix}".encode()).digest()
                yield at, layer, page, np.resize(np.frombuffer(seed, np.uint8), len(page))

    def generate(self, name: str, tokens: Iterable[int], max_tokens: int = 2) -> Any:
        """Run one request and its stores to the end; returns it."""
        request = self.world.add(name, tokens, max_tokens=max_tokens)
        until(lambda: self.step() and request.is_finished(), "the request's end")
        until(lambda: self.step() and not self.world.scheduler.has_requests(), "its stores")
        if self.daemon is not None:
            # commits are one-way messages: they may still be on their way
            self.daemon.wait_until(reservations=0)
        return request

    def load(self, name: str, tokens: Iterable[int], **fields: Any) -> Any:
        """Add a request, and step until it computes; returns it and the tokens it began with.
        ``fields``: as for ``SchedulerHarness.add``."""
        request = self.world.add(name, tokens, **fields)
        self.found.pop(name, None)
        until(lambda: self.step() and name in self.found, "the request's first tokens")
        return request, self.found[name]

    def verify(self, request: Any, tokens: int) -> None:
        """Check every page that the token after ``tokens`` reads, on all ranks."""
        wrong = next(self._wrong(request, tokens), "")
        self.wrong = self.wrong or wrong
        assert self.tolerant or not wrong, wrong

    def _wrong(self, request: Any, tokens: int) -> Iterator[str]:
        layouts = self.world.connector._planner._setup.groups
        for group, ids in enumerate(self.tables(request.request_id)):
            one = layouts[group]
            for number in one.blocks(one.needs(tokens), tokens):
                upto = tokens if one.kind == "state" else (number + 1) * one.block_tokens
                if upto > tokens:
                    continue  # a hit inside a block, whose page is not complete
                if not ids[number]:
                    yield f"group {group}: block {number} is not there"
                for at, layer, page, said in self._pages(group, ids[number], request, upto):
                    if (page != said).any():
                        yield f"group {group} ({one.kind}), block {number} of {tokens} tokens: " + (
                            f"rank {at}, layer {layer}"
                        )

    def close(self) -> None:
        """As at the engine's end."""
        self.world.scheduler.shutdown()
        for rank in self.ranks.all:
            rank.close()


E = TypeVar("E", bound=StubModelEngine)


@contextmanager
def making(make: Callable[..., E]) -> Iterator[Callable[..., E]]:
    """A function that makes engines and waits until they are connected. They are closed here."""
    made: list[E] = []

    def connected(*args: Any, **options: Any) -> E:
        made.append(make(*args, **options))
        made[-1].wait_connected()
        return made[-1]

    yield connected
    for one in made:
        one.close()


def until(condition: Callable[[], Any], what: str, timeout_s: float = TIMEOUT_S) -> None:
    """Wait for ``condition``. Raises ``AssertionError`` naming ``what``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"in vain: {what}"
        time.sleep(0.005)
