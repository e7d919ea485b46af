"""``StubModelEngine`` for several layer groups: vLLM's scheduler, our connector, no model.

The content of a page follows from its group, its layer and the tokens up to its end, so a page of
the wrong group, layer or token range is noticed. All that a request begins with is verified.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvass.testing.daemon import Daemon
from kvass.types import PAGE
from tests.support.vllm.ranks import (
    StubModelEngine,
    StubModelRank,
    synchronize,
    until,
    worker_connector,
)
from tests.support.vllm.scheduler import SchedulerHarness, make_configs, tell

GroupShape = tuple[Literal["full", "sliding_window", "chunked_local", "state"], int, int, int]
"""Kind, block tokens, window tokens, layers."""


def make_hybrid_configs(
    extra: dict[str, object],
    shapes: Sequence[GroupShape],
    *,
    alignment: int = 0,
    draft_states: int = 0,
    retention: int | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """vLLM's own and its KV cache configuration, for groups of these shapes.

    As in vLLM, all groups share one storage: a block belongs to one group at a time. ``alignment``
    0 means vLLM's own; ``draft_states`` are the blocks of a request for states of drafts;
    ``retention`` is vLLM's interval.
    """
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

    config, plain = make_configs(extra, **options)
    for block_tokens in (block for kind, block, *_ in shapes if kind == "state"):
        config.cache_config.mamba_cache_mode = "align"
        config.cache_config.block_size = block_tokens
    blocks, page, groups, tensors = plain.num_blocks, PAGE, [], []
    stride = page * max(layers for *_, layers in shapes)
    for number, (kind, block_tokens, window, count) in enumerate(shapes):
        spec = _spec(kind, block_tokens, window, page, draft_states)
        layers = [f"{number}.{kind}.{i}" for i in range(count)]
        groups.append(KVCacheGroupSpec(layers, spec))
        tensors.append(
            KVCacheTensor(
                size=blocks * stride, layers=layers, layer_stride=page, block_stride=stride
            )
        )
    caches = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)
    caches.prefix_cache_retention_interval = retention
    sizes = kv_cache_utils.resolve_kv_cache_block_sizes(caches, config)
    tell(caches, hash_block_size=sizes[1])
    if hasattr(caches, "cache_hit_alignment_tokens"):
        own = kv_cache_utils.resolve_cache_hit_alignment_tokens(caches, config, *sizes)
        caches.cache_hit_alignment_tokens = alignment or own
    return config, caches


def _spec(kind: str, block_tokens: int, window: int, page: int, draft_states: int) -> Any:
    """A spec with pages of ``page`` bytes, whatever its block size."""
    import torch
    from vllm.v1 import kv_cache_interface as kv

    if kind == "state":
        return kv.MambaSpec(
            block_size=block_tokens,
            shapes=((16, 32),),
            dtypes=(torch.float32,),
            page_size_padded=page,
            mamba_cache_mode="align",
            num_speculative_blocks=draft_states,
        )
    common: dict[str, Any] = {
        "block_size": block_tokens,
        "num_kv_heads": 1,
        "head_size": 8,
        "dtype": torch.int8,
        "page_size_padded": page,
    }
    if kind == "full":
        return kv.FullAttentionSpec(**common)
    if kind == "sliding_window":
        return kv.SlidingWindowSpec(**common, sliding_window=window)
    return kv.ChunkedLocalAttentionSpec(**common, attention_chunk_size=window)


class HybridRank(StubModelRank):
    """A worker with several groups."""

    def __init__(self, config: Any, caches: Any) -> None:
        import torch

        self.gate, self.speculative = None, False
        self._tensors = caches.kv_cache_tensors
        """One per group, as ``make_hybrid_configs`` makes them."""
        memory = torch.zeros(caches.kv_cache_tensors[0].size, dtype=torch.uint8)
        self._bytes: npt.NDArray[np.uint8] = memory.numpy()
        self.connector = worker_connector(config, caches)
        self.connector.register_kv_caches(
            {
                name: memory[tensor.offset + i * tensor.layer_stride :]
                for tensor in caches.kv_cache_tensors
                for i, name in enumerate(tensor.layers)
            }
        )

    def page(self, group: int, layer: int, block: int) -> npt.NDArray[np.uint8]:
        """The page of a block in a layer of a group; the engine reads and writes it."""
        synchronize(self.connector)
        tensor = self._tensors[group]
        at = tensor.offset + layer * tensor.layer_stride + block * tensor.block_stride
        return self._bytes[at : at + PAGE]

    def copy_blocks(self, copies: Iterable[Any]) -> None:
        """As vLLM's runner: a request that hits inside a block continues in a copy of it."""
        synchronize(self.connector)
        stride = self._tensors[0].block_stride
        blocks = self._bytes.reshape(-1, stride)
        for one in copies:
            blocks[one.dst_block_id] = blocks[one.src_block_id]


class HybridEngine(StubModelEngine):
    """A scheduler and one rank of groups ``shapes``, on the daemon at ``socket``."""

    def __init__(
        self,
        socket: str,
        shapes: Sequence[GroupShape],
        daemon: Daemon | None = None,
        asynchronous: bool = False,
        chunk: int = 64,
        **options: Any,
    ) -> None:
        self.shapes = shapes
        extra: dict[str, object] = {"kvass.socket": socket, "kvass.chunk_tokens": chunk}
        config, caches = make_hybrid_configs(extra, shapes, **options)
        world = SchedulerHarness(None, configs=(config, caches), asynchronous=asynchronous)
        self._begin(world, [HybridRank(config, caches)], daemon)
        self.found: dict[str, int] = {}
        """By request that has begun: the tokens that it found cached or loaded."""
        self.chunk = int(self.world.connector._planner._setup.chunk_tokens)

    def tables(self, name: str) -> tuple[list[int], ...]:
        """The block ids of a live request, by group."""
        found: tuple[list[int], ...] = self.world.scheduler.kv_cache_manager.get_block_ids(name)
        return found

    def step(self) -> Any:
        """``StubModelEngine.step``, which also verifies what a request begins with when it first
        computes, or first computes after a preemption."""
        output, work = self.world.schedule()
        if output.kv_cache_block_copies:
            self.rank.copy_blocks(output.kv_cache_block_copies)  # type: ignore[attr-defined]
        fresh = {new.req_id for new in output.scheduled_new_reqs}
        fresh |= set(output.scheduled_cached_reqs.resumed_req_ids)
        for name, count in output.num_scheduled_tokens.items():
            request = self.world.scheduler.requests[name]
            end = request.num_computed_tokens
            if name in fresh:
                self.found[name] = end - count
                self.verify(request, end - count)
            self.write(request, end - count, end)
        return self.run_ranks(output, work)

    def write(self, request: Any, begin: int, end: int) -> None:
        """The forward pass: the pages of all blocks that tokens ``[begin, end)`` complete, and the
        state at ``end``."""
        for group, ids in enumerate(self.tables(request.request_id)):
            kind, block_tokens, *_ = self.shapes[group]
            if kind == "state":
                wanted = [(-(-end // block_tokens) - 1, end)]
            else:
                numbers = range(begin // block_tokens, end // block_tokens)
                wanted = [(n, (n + 1) * block_tokens) for n in numbers]
            for number, upto in wanted:
                if number < len(ids) and ids[number]:
                    self._fill(group, ids[number], request.all_token_ids, upto)

    def _fill(self, group: int, block: int, tokens: Sequence[int], upto: int) -> None:
        for layer in range(self.shapes[group][3]):
            page = self.rank.page(group, layer, block)  # type: ignore[attr-defined]
            page[:] = content(group, layer, tokens[:upto], len(page))

    def verify(self, request: Any, tokens: int) -> None:
        """Check every page that the token after ``tokens`` reads."""
        layouts = self.world.connector._planner._setup.groups
        for group, ids in enumerate(self.tables(request.request_id)):
            one, layers = layouts[group], self.shapes[group][3]
            for number in one.blocks(one.needs(tokens), tokens):
                upto = tokens if one.kind == "state" else (number + 1) * one.block_tokens
                if upto > tokens:
                    continue  # a hit inside a block, whose page is not complete
                assert ids[number], f"group {group}: block {number} is not there"
                for layer in range(layers):
                    page = self.rank.page(group, layer, ids[number])  # type: ignore[attr-defined]
                    said = content(group, layer, request.all_token_ids[:upto], len(page))
                    where = f"group {group} ({one.kind}), layer {layer}, block {number}"
                    assert (page == said).all(), f"{where} of {tokens} tokens"

    def load(self, name: str, tokens: Iterable[int]) -> Any:
        """Add a request, and step until it computes; returns it and the tokens it began with."""
        request = self.world.add(name, tokens)
        until(lambda: self.step() and name in self.found, "the request's first tokens")
        return request, self.found[name]


def content(group: int, layer: int, tokens: Sequence[int], size: int) -> npt.NDArray[np.uint8]:
    """The content of a page that ends with the last of ``tokens``."""
    seed = hashlib.sha256(f"{group}.{layer}.{list(tokens)}".encode()).digest()
    return np.resize(np.frombuffer(seed, np.uint8), size)
