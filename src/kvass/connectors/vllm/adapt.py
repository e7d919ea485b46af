"""Everything that knows a version of vLLM: what it is called there, and what it means to us.

Law of this file: no other file of the connector knows more of vLLM than the hooks of the connector
base class and a request's id. Another version means changing this file and ``TESTED``.

Facts relied on (0.32): block i of a group ends at ``block_hashes[(i+1)*block/hash_block - 1]``; the
page of layer ``t.layers[l]``, block b, is at ``t.offset + l*t.layer_stride + b*t.block_stride`` in
the layer's storage, ``page_size_bytes`` long; ``touch`` and ``free_blocks`` hold and free a block.
"""

from __future__ import annotations

import ctypes
import inspect
import math
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from kvass.config import default_socket
from kvass.connectors.vllm import identity
from kvass.connectors.vllm.options import read_options
from kvass.errors import ConfigError, UsageError
from kvass.layout.describe import GroupPlanes, describe_group
from kvass.messages import Register
from kvass.transfer.base import U8Array
from kvass.types import GroupLayout, RankLayout

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorTransferResults,
        KVConnectorWorkerMetadata,
        SupportsHMA,
    )
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    HIT_SOURCE: Any = CacheHitSource.HOST
except ImportError:  # an older vLLM: the connector loads, says so, and stays inert
    KVConnectorTransferResults = KVConnectorWorkerMetadata = SupportsHMA = object
    HIT_SOURCE = None

__all__ = [
    "HIT_SOURCE",
    "KVConnectorBase_V1",
    "KVConnectorMetadata",
    "KVConnectorRole",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "SupportsHMA",
]

TESTED: Final = frozenset({"0.32.0"})
MIN_CHUNK_TOKENS: Final = 256
FULL_KINDS: Final = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
DEVICES: Final = frozenset({"cpu"})
CODE: Final = "hf_config_path config_format model_class_overrides model_impl code_revision"
"""Settings of the model that choose the code which computes it."""
ORIGIN: Final = frozenset({"_name_or_path", "_commit_hash"})  # ``weights`` says so already


# ---------------------------------------------------------------- environment


@dataclass(frozen=True)
class Inert:
    """Why the engine must run uncached here."""

    reason: str


@dataclass(frozen=True)
class Setup:
    """What both sides of the connector need to know. Sizes in tokens, lists by group id."""

    socket: str
    registration: Register
    chunk_tokens: int
    hash_tokens: int
    block_tokens: tuple[int, ...]
    loads: bool
    stores: bool

    @property
    def ranks(self) -> int:
        """Worker processes that each report and release."""
        return self.registration.ranks


def read_setup(vllm_config: Any, kv_cache_config: Any) -> Setup | Inert:
    """Read the engine's configuration.

    Raises :class:`ConfigError` for what the operator must correct (an option, the role, the hash
    algorithm); returns :class:`Inert` for a model or environment that is not supported yet.
    """
    transfer = vllm_config.kv_transfer_config
    options = read_options(transfer.kv_connector_extra_config)
    version = vllm.__version__.partition("+")[0]
    if version not in TESTED:
        return Inert(f"vLLM {version} was never tested; tested: {', '.join(sorted(TESTED))}")
    if not transfer.is_kv_consumer:
        raise ConfigError(f"kv_role {transfer.kv_role}: use kv_both, or kv_consumer to only read")
    _check_hash_algorithm(vllm_config.cache_config.prefix_caching_hash_algo)
    chunk_tokens = _chunk_tokens(options.chunk_tokens, kv_cache_config)
    if reason := _unsupported(vllm_config, kv_cache_config):
        return Inert(reason)
    blocks = tuple(group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups)
    hash_tokens = kv_cache_config.hash_block_size or blocks[0]
    try:
        fields = _identity(vllm_config, kv_cache_config, version)
    except identity.Indescribable as error:
        return Inert(str(error))
    fields |= {"tokens": f"{chunk_tokens}/{blocks}/{hash_tokens}", "tag": options.tag}
    return Setup(
        socket=options.socket or default_socket(),
        registration=Register(
            instance=transfer.engine_id, identity=fields, chunk_tokens=chunk_tokens
        ),
        chunk_tokens=chunk_tokens,
        hash_tokens=hash_tokens,
        block_tokens=blocks,
        loads=transfer.is_kv_consumer,
        stores=transfer.is_kv_producer,
    )


def recompute_failed_loads(vllm_config: Any) -> None:
    """Law 8: a load that fails is recomputed. The scheduler reads this setting after making us.

    Inside a MultiConnector we are given a copy of the configuration, and nothing refers to the one
    the scheduler reads but the frames that are making us right now.
    """
    vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
    frame = inspect.currentframe()
    while frame is not None:
        outer = getattr(frame.f_locals.get("vllm_config"), "kv_transfer_config", None)
        if outer is not None:
            outer.kv_load_failure_policy = "recompute"
        frame = frame.f_back


def _check_hash_algorithm(algorithm: str) -> None:
    """vLLM seeds its xxhash variants at random in each process, unless told otherwise."""
    if "xxhash" in algorithm and "PYTHONHASHSEED" not in os.environ:
        raise ConfigError(
            f"prefix-caching hash algorithm {algorithm} is seeded at random in each process: "
            "set PYTHONHASHSEED to the same number for all engines, or use sha256"
        )


def _chunk_tokens(wanted: int, kv_cache_config: Any) -> int:
    """The chunk size in tokens: DESIGN section 3."""
    sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
    unit = math.lcm(*sizes, kv_cache_config.cache_hit_alignment_tokens or 1)
    if wanted % unit:
        raise ConfigError(
            f"kvass.chunk_tokens {wanted} does not fit this model: give a multiple of {unit} "
            "(its block sizes and hit alignment)"
        )
    return wanted or unit * -(-MIN_CHUNK_TOKENS // unit)


def _unsupported(vllm_config: Any, kv_cache_config: Any) -> str:
    """Why this engine cannot be served yet; empty if it can."""
    if max(sizes := _parallel_sizes(vllm_config.parallel_config)) > 1:
        return f"an engine of several ranks (tp, pp, dcp, pcp = {sizes}) is not supported yet"
    device = device_kind()
    if device not in DEVICES:
        return f"device {device!r} is not supported yet; supported: {', '.join(sorted(DEVICES))}"
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return f"a model with {len(groups)} KV cache groups is not supported yet"
    kinds = {type(spec).__name__ for spec in _layer_specs(groups[0]).values()}
    if not kinds <= FULL_KINDS:
        return f"KV cache group of kind {', '.join(sorted(kinds - FULL_KINDS))} is not supported"
    if kv_cache_config.prefix_cacheable_group_ids != (0,):
        return "the model's KV cache group is not prefix-cacheable"
    return ""


def _parallel_sizes(parallel: Any) -> tuple[int, ...]:
    names = ("tensor", "pipeline", "decode_context", "prefill_context")  # tp, pp, dcp, pcp
    return tuple(getattr(parallel, f"{name}_parallel_size") for name in names)


def device_kind() -> str:
    """vLLM's name of the device that holds the KV cache, e.g. ``cpu``."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


# ---------------------------------------------------------------- identity


def _identity(vllm_config: Any, kv_cache_config: Any, version: str) -> dict[str, str]:
    """The namespace's tagged fields (DESIGN section 4), equal in all processes of one engine."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    load, attention = vllm_config.load_config, vllm_config.attention_config
    kinds = [attention.backend, attention.backend_per_kind]
    kinds.append(getattr(attention, "use_non_causal", False))
    return {
        "engine": f"vllm {version}",
        "model": _model_name(model.model),
        "weights": _weights(model),
        "config": identity.canonical(_without_origin(model.hf_config.to_dict()), "hf_config"),
        "code": identity.canonical(
            {name: getattr(model, name) for name in CODE.split()}, "model_config"
        ),
        "overrides": identity.canonical(model.hf_overrides, "hf_overrides"),
        "loader": identity.canonical(
            [load.load_format, load.model_loader_extra_config]
            + ([model.seed] if str(load.load_format) == "dummy" else []),
            "load_config",
        ),
        "dtype": str(model.dtype),
        "quantization": identity.canonical(
            [model.quantization, model.quantization_config], "quant"
        ),
        "positions": _positions(model),
        "kv_dtype": identity.canonical([cache.cache_dtype, cache.kv_cache_dtype_skip_layers]),
        "kv_layout": str(kv_cache_config.kv_cache_layout),
        "hash": _hash_identity(cache.prefix_caching_hash_algo),
        "device": _device_identity(),
        "attention": identity.canonical(kinds, "attention_config"),
        "parallel": identity.canonical(_parallel_sizes(vllm_config.parallel_config)),
        "speculative": _speculative(vllm_config.speculative_config),
    }


def _without_origin(config: Any) -> Any:
    """A Hugging Face configuration but for where it and its parts lay."""
    if not isinstance(config, dict):
        return config
    return {name: _without_origin(of) for name, of in config.items() if name not in ORIGIN}


def _model_name(name: str) -> str:
    """For people (``kvass status``): a local path in its one spelling, anything else as it is."""
    return os.path.realpath(name) if os.path.exists(name) else name


def _weights(model: Any) -> str:
    """A local path by its files, anything else by name and revision (and commit, if known)."""
    for name in (model.model, model.model_weights):
        if name and os.path.exists(name):
            return f"local:{identity.local_weights(Path(name))}"
    commit = getattr(model.hf_config, "_commit_hash", None)
    return identity.canonical([model.model, model.model_weights, model.revision, commit])


def _positions(model: Any) -> str:
    """With LongRoPE (formerly "su"), the engine's maximum length chooses the rotary factors."""
    config = model.hf_text_config
    rope = [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")]
    text = identity.canonical(rope)
    return str(model.max_model_len) if "longrope" in text or '"su"' in text else ""


def _hash_identity(algorithm: str) -> str:
    """Algorithm and a digest of the seed, as vLLM's own resolver gives it."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    seed = resolve_none_hash_seed(get_hash_fn_by_name(algorithm))
    return f"{algorithm}:{identity.digest([seed])}"


def _device_identity() -> str:
    """Device kind and, on a CPU, the instruction sets by which vLLM packs its pages."""
    sets = (torch.cpu._is_avx512_supported(), torch.cpu._is_amx_tile_supported())
    capability = torch.backends.cpu.get_cpu_capability()
    return identity.canonical([device_kind(), platform.machine(), capability, sets])


def _speculative(config: Any) -> str:
    """The draft model's layers share the cache, so its weights are part of the bytes."""
    if config is None:
        return ""
    weights = _weights(draft) if (draft := config.draft_model_config) is not None else ""
    return identity.canonical([config.method, config.num_speculative_tokens, weights])


# ---------------------------------------------------------------- layout and memory


@dataclass(frozen=True)
class Memory:
    """The engine's KV pages as bytes. ``owners`` keep the memory of ``regions`` alive."""

    layout: RankLayout
    planes: tuple[GroupPlanes, ...]
    regions: tuple[U8Array, ...]
    owners: tuple[object, ...]


def read_memory(kv_cache_config: Any, kv_caches: Mapping[str, Any], chunk_tokens: int) -> Memory:
    """Find every layer's pages in ``kv_caches`` (layer name -> tensor), from the config alone.

    Raises :class:`UsageError` if config and tensors contradict each other.
    """
    placed = {
        name: (tensor, index)
        for tensor in kv_cache_config.kv_cache_tensors
        for index, name in enumerate(tensor.layers)
    }
    regions = _Regions()
    layouts, planes = [], []
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        specs = {name: spec for name, spec in _layer_specs(group).items() if name in placed}
        layout = GroupLayout(
            kind="full",
            block_tokens=group.kv_cache_spec.block_size,
            layers=tuple(specs),
            page_bytes=tuple(spec.page_size_bytes for spec in specs.values()),
        )
        bases, strides, where = [], [], []
        for name in specs:
            tensor, index = placed[name]
            bases.append(tensor.offset + index * tensor.layer_stride)
            strides.append(tensor.block_stride)
            where.append(regions.add(name, kv_caches[name], bases[-1]))
        blocks = kv_cache_config.num_blocks
        layouts.append(layout)
        planes.append(describe_group(number, layout, chunk_tokens, blocks, bases, strides, where))
    return Memory(
        RankLayout(tuple(layouts)), tuple(planes), tuple(regions.arrays), tuple(regions.owners)
    )


def _layer_specs(group: Any) -> dict[str, Any]:
    """Layer name -> its cache spec; one group may hold a spec per layer."""
    spec = group.kv_cache_spec
    each = getattr(spec, "kv_cache_specs", {})
    return {name: each.get(name, spec) for name in group.layer_names}


class _Regions:
    """The distinct storages under a set of tensors, as byte arrays."""

    def __init__(self) -> None:
        self.arrays: list[U8Array] = []
        self.owners: list[object] = []
        self._known: dict[int, int] = {}

    def add(self, layer: str, cache: Any, base: int) -> int:
        """The region of ``cache``, whose first block must begin at byte ``base`` of it."""
        tensor = cache[0] if isinstance(cache, list | tuple) else cache
        storage = tensor.untyped_storage()
        start, size = storage.data_ptr(), storage.nbytes()
        if tensor.data_ptr() - start != base:
            raise UsageError(
                f"layer {layer}: block 0 lies at byte {tensor.data_ptr() - start} of its storage, "
                f"the KV cache config says {base}"
            )
        if start not in self._known:
            self._known[start] = len(self.arrays)
            memory = (ctypes.c_uint8 * size).from_address(start)
            self.arrays.append(np.ctypeslib.as_array(memory))
            self.owners.append(storage)
        return self._known[start]


# ---------------------------------------------------------------- requests and steps


def chunk_hashes(request: Any, chunks: int, setup: Setup) -> tuple[bytes, int]:
    """The hashes of the first ``chunks`` chunks of ``request``, back to back, and their width."""
    if chunks == 0:
        return b"", 0
    step = setup.chunk_tokens // setup.hash_tokens
    hashes = request.block_hashes[step - 1 : chunks * step : step]
    return b"".join(hashes), len(hashes[0])


def hashed_chunks(request: Any, setup: Setup) -> int:
    """Chunks of ``request`` whose tokens are all known and hashed."""
    return len(request.block_hashes) * setup.hash_tokens // setup.chunk_tokens


def stored_chunks(request: Any, scheduled: int, setup: Setup) -> int:
    """Chunks of ``request`` that will be computed, for good, once this step has run.

    During ``build_connector_meta`` ``num_computed_tokens`` is still that before the step, and
    counts drafts and placeholders in flight. Hashes exist for known tokens only, and a known token
    is never computed again: so it is they that exclude drafts.
    """
    computed = request.num_computed_tokens + scheduled
    return min(int(computed) // setup.chunk_tokens, hashed_chunks(request, setup))


def reads_cache(request: Any) -> bool:
    """Whether the request may be served from a cache at all (prompt logprobs may not)."""
    return not request.skip_reading_prefix_cache


def has_computed(request: Any) -> bool:
    """Whether some of the request's KV exists, or is being loaded."""
    return bool(request.num_computed_tokens)


def step_tokens(output: Any) -> Iterable[tuple[str, int]]:
    """Request ids of a step and how many tokens of each it computes."""
    scheduled: dict[str, int] = output.num_scheduled_tokens
    return scheduled.items()


def block_table(blocks: Any) -> tuple[Sequence[int], ...]:
    """The block ids, by group, that ``update_state_after_alloc`` brings."""
    table: tuple[Sequence[int], ...] = blocks.get_block_ids()
    return table


def step_blocks(output: Any, request: str) -> tuple[Sequence[int], ...] | None:
    """The block table of ``request``, by group, during ``build_connector_meta``."""
    table: tuple[Sequence[int], ...] | None = output.kv_connector_block_state.get_block_ids(request)
    return table


class Pool:
    """The engine's block pool: blocks are held until we let go of them."""

    def __init__(self, block_pool: Any) -> None:
        self._pool = block_pool

    def hold(self, ids: Iterable[int]) -> list[Any]:
        """Keep these blocks from being reused, whatever becomes of their requests."""
        blocks = [self._pool.blocks[i] for i in ids]
        self._pool.touch(blocks)
        return blocks

    def free(self, held: list[Any]) -> None:
        """Undo one ``hold``; the tail of a request is reused first, as vLLM does it."""
        self._pool.free_blocks(reversed(held))

    def waiting(self, held: Iterable[Any]) -> bool:
        """Whether letting go of ``held`` would free a block: nobody else uses it."""
        return any(block.ref_cnt == 1 for block in held)
