"""The engine's configuration, in kvass's terms: who shares bytes with whom, and when we stay out.

Law of this file: one reading at start, by both sides, gives one frozen ``Setup`` or the reason for
being inert. A file of vLLM's version (see ``adapt.py``). Parallelism is read here only, into a
``ParallelStrategy``.

Facts relied on (0.32): ``parallel_config.rank`` is a worker's place in its engine, tensor-parallel
ranks consecutive; ``kv_tp_replicas`` consecutive ones of them hold equal KV. Under decode context
parallelism a block id stands for ``block_size * dcp`` tokens, of which each rank's page holds its
share. A data-parallel rank is an engine of its own, with an ``engine_id`` of its own.
"""

from __future__ import annotations

import inspect
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import vllm

from kvass._version import TESTED_VLLM
from kvass.client.parallel import ParallelStrategy
from kvass.config import default_socket
from kvass.connectors.vllm import identity
from kvass.connectors.vllm.groups import (
    Unsupported,
    any_non_causal,
    has_states,
    page_formats,
    read_groups,
)
from kvass.connectors.vllm.options import read_options
from kvass.errors import ConfigError
from kvass.messages import Register
from kvass.transfer import DEVICES, ON_REQUEST
from kvass.types import MAX_RANKS, GroupLayout, RankLayout

TESTED: Final = TESTED_VLLM
MIN_CHUNK_TOKENS: Final = 256
CODE: Final = "hf_config_path config_format model_class_overrides model_impl code_revision"
"""Settings of the model that choose the code which computes it."""
LORA: Final = (
    "lora_dtype target_modules enable_tower_connector_lora "
    "enable_mixed_moe_lora_format enable_moe_shared_loras"
)
ORIGIN: Final = frozenset({"_name_or_path", "_commit_hash"})  # ``weights`` says so already


@dataclass(frozen=True)
class Inert:
    """Why the engine must run uncached here."""

    reason: str


@dataclass(frozen=True)
class Setup:
    """What both sides of the connector need to know. Sizes in tokens, lists by group id.

    The layers named in ``groups`` are those of one rank: only a worker knows its own.
    ``strategy`` is the scheduler's; a worker's is ``strategy.at(rank)``.
    """

    socket: str
    instance: str
    identity: Mapping[str, str]
    strategy: ParallelStrategy
    chunk_tokens: int
    hash_tokens: int
    groups: tuple[GroupLayout, ...]
    loads: bool
    stores: bool
    single_copies: bool = False
    """On a GPU: a call of the driver per run."""
    spare: int = 0
    """Chunks that must be known to follow a hit (``messages.Lookup``)."""
    adapters: str = ""
    """Settings that change what a LoRA adapter computes (``adapters.py``)."""

    @property
    def hits_whole_prompts(self) -> bool:
        """Whether a hit may end at a prompt's last token.

        vLLM computes that token again, and a state that contains it already would count it twice;
        what lies before a window of it may be gone.
        """
        return all(group.kind == "full" for group in self.groups)

    def register(
        self, strategy: ParallelStrategy | None = None, layout: RankLayout | None = None
    ) -> Register:
        """How the scheduler, or the worker of ``strategy`` and ``layout``, registers."""
        chosen = strategy or self.strategy
        return chosen.register(self.instance, self.identity, self.chunk_tokens, layout)


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
    blocks = _block_tokens(vllm_config.parallel_config, kv_cache_config)
    chunk_tokens = _chunk_tokens(options.chunk_tokens, blocks, kv_cache_config)
    if reason := _unsupported(vllm_config, kv_cache_config, options.gpu):
        return Inert(reason)
    hash_tokens = kv_cache_config.hash_block_size or blocks[0]
    try:
        groups = read_groups(kv_cache_config, blocks)
        page_formats(kv_cache_config)  # raises here what a rank would find too late
        fields = _identity(vllm_config, kv_cache_config, version)
        adapters = _adapters(vllm_config.lora_config)
    except (Unsupported, identity.Indescribable) as error:
        return Inert(str(error))
    fields |= {"tokens": f"{chunk_tokens}/{blocks}/{hash_tokens}", "tag": options.tag}
    return Setup(
        socket=options.socket or default_socket(),
        instance=transfer.engine_id,
        identity=fields,
        strategy=_strategy(vllm_config.parallel_config, kv_cache_config),
        chunk_tokens=chunk_tokens,
        hash_tokens=hash_tokens,
        groups=groups,
        single_copies=options.gpu_copies == "single",
        loads=transfer.is_kv_consumer,
        stores=transfer.is_kv_producer,
        spare=_spare_chunks(vllm_config, kv_cache_config, chunk_tokens),
        adapters=adapters,
    )


def wanted_layout(vllm_config: Any) -> str | None:
    """vLLM's name of the KV cache layout that the options ask for: blocks outermost, in which a
    block of all layers is one piece. None: they ask for none, or this vLLM was never tested.

    A preference only: ``VLLM_KV_CACHE_LAYOUT`` goes before it, and where the model's attention
    cannot have it vLLM warns and takes its own. Raises :class:`ConfigError`.
    """
    wanted = read_options(vllm_config.kv_transfer_config.kv_connector_extra_config).kv_layout
    if not wanted or vllm.__version__.partition("+")[0] not in TESTED:
        return None
    if wanted != "blocks":
        return wanted
    capability = _capability()  # Blackwell's kernels want a block's heads before its tokens
    return "BLHNC" if capability is not None and capability[0] >= 10 else "BLNHC"


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


def _block_tokens(parallel: Any, kv_cache_config: Any) -> tuple[int, ...]:
    """Tokens for which one block id of each group stands, all ranks' shares together."""
    dcp = parallel.decode_context_parallel_size
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return tuple(spec.block_size * (dcp if spec.dcp_sharded else 1) for spec in specs)


def _chunk_tokens(wanted: int, blocks: tuple[int, ...], kv_cache_config: Any) -> int:
    """The chunk size in tokens: DESIGN section 3; with states it is no larger than it must be.

    A prompt leaves one state behind, at its last block boundary, unless vLLM was told to retain
    more: a chunk of several blocks would mostly not end there.
    """
    unit = math.lcm(*blocks, kv_cache_config.cache_hit_alignment_tokens or 1)
    if wanted % unit:
        raise ConfigError(
            f"kvass.chunk_tokens {wanted} does not fit this model: give a multiple of {unit} "
            "(its block sizes and hit alignment)"
        )
    least = unit if has_states(kv_cache_config) else MIN_CHUNK_TOKENS
    return wanted or unit * -(-least // unit)


def _spare_chunks(vllm_config: Any, kv_cache_config: Any, chunk_tokens: int) -> int:
    """How many chunks a hit must leave unused.

    A drafter that reads the model's hidden states (EAGLE, MTP) computes its KV of a token with the
    tokens after it. vLLM uses of a match all but the last block, so that it knows them to be equal.
    """
    speculative = vllm_config.speculative_config
    flagged = any(group.is_eagle_group for group in kv_cache_config.kv_cache_groups)
    if not flagged and (speculative is None or not speculative.use_eagle_block_drop()):
        return 0
    lookahead = int(vllm_config.num_prefill_lookahead_tokens)
    return -(-max(1, lookahead) // chunk_tokens)


def _unsupported(vllm_config: Any, kv_cache_config: Any, gpu: bool) -> str:
    """Why this engine cannot be served yet; empty if it can."""
    if reason := _unsupported_ranks(vllm_config.parallel_config):
        return reason
    device = device_kind()
    if device in ON_REQUEST and not gpu:
        return f"device {device!r} was never tried; to do that set kvass.gpu (docs/gpu.md)"
    if device not in DEVICES | ON_REQUEST:
        return f"device {device!r} is not supported yet; supported: {', '.join(sorted(DEVICES))}"
    if not kv_cache_config.kv_cache_groups:
        return "a model without KV cache has nothing to share"
    stages = vllm_config.parallel_config.pipeline_parallel_size
    drafts = vllm_config.speculative_config is not None
    if drafts and stages > 1 and has_states(kv_cache_config):
        # Earlier stages hear some steps later which drafts stood, and correct their states then:
        # by that time they may have been stored.
        return "a model with states, pipeline stages and speculative decoding is not supported"
    return _never_cached(vllm_config.model_config, kv_cache_config)


def _never_cached(model: Any, kv_cache_config: Any) -> str:
    """Why vLLM itself caches no prefix of this model; empty if it may.

    It asks a connector all the same, and its answer would be wrong or the end of the engine: a
    prompt pooled from its first token or from all of them must be computed whole, and what attends
    to tokens after itself depends on them. Whether vLLM's own cache is on is another matter: it may
    be off for reasons of its own.
    """
    never = "vLLM supports no prefix caching for it"
    if any_non_causal(kv_cache_config):
        return f"a model with attention that is not causal is not supported: {never}"
    if not model.is_prefix_caching_supported:
        pooled = f", pooled by {pooling_of(model)}" if model.pooler_config else ""
        return f"a model of this kind ({model.attn_type}{pooled}) is not supported: {never}"
    return ""


def pooling_of(model: Any) -> str:
    """How a pooling model makes one vector of a prompt's, or of its tokens."""
    pooler = model.pooler_config
    return str(pooler.seq_pooling_type or pooler.tok_pooling_type)


def device_kind() -> str:
    """vLLM's name of the device that holds the KV cache, e.g. ``cpu``."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def _device_name() -> str:
    """vLLM's name of the kind of device; unlike ``device_kind`` it tells ROCm from CUDA."""
    from vllm.platforms import current_platform

    return str(current_platform.device_name)


def _capability() -> tuple[int, int] | None:
    """The compute capability of the first device that this process may use; None on a CPU.

    The scheduler and every rank ask, and a process that does not use the GPU must not begin to:
    vLLM reads it without a CUDA context.
    """
    from vllm.platforms import current_platform

    found = current_platform.get_device_capability()
    return None if found is None else (int(found.major), int(found.minor))


# ---------------------------------------------------------------- parallelism


def worker_rank(vllm_config: Any) -> int:
    """This worker process's place among the ranks of its engine."""
    return int(vllm_config.parallel_config.rank)


def _strategy(parallel: Any, kv_cache_config: Any) -> ParallelStrategy:
    """The scheduler's view. Every rank of it releases, reports and, if it writes, commits."""
    return ParallelStrategy(
        tp=parallel.tensor_parallel_size,
        pp=parallel.pipeline_parallel_size,
        replicas=kv_cache_config.kv_tp_replicas,
    )


def _unsupported_ranks(parallel: Any) -> str:
    """Why these ranks cannot be served; empty if they can."""
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    if parallel.prefill_context_parallel_size > 1:
        return "prefill context parallelism is not supported"
    if ranks > MAX_RANKS:
        return f"an engine of {ranks} ranks is not supported; at most {MAX_RANKS}"
    if parallel.nnodes_within_dp > 1:
        return "an engine whose ranks are on several machines is not supported"
    return ""


def _parallel_identity(parallel: Any) -> list[int]:
    """What decides which tokens, heads and layers a rank's page holds."""
    dcp = parallel.decode_context_parallel_size
    interleave = parallel.cp_kv_cache_interleave_size if dcp > 1 else 1
    return [parallel.tensor_parallel_size, parallel.pipeline_parallel_size, dcp, interleave]


# ---------------------------------------------------------------- identity


def _identity(vllm_config: Any, kv_cache_config: Any, version: str) -> dict[str, str]:
    """The namespace's tagged fields (DESIGN section 4), equal in all processes of one engine."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    load, attention = vllm_config.load_config, vllm_config.attention_config
    kinds = [attention.backend, attention.backend_per_kind]
    kinds += [attention.use_non_causal, attention.indexer_kv_dtype]
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
        "states": _states(vllm_config),
        "kv_layout": str(kv_cache_config.kv_cache_layout),
        "hash": _hash_identity(cache.prefix_caching_hash_algo),
        "device": _device_identity(),
        "attention": identity.canonical(kinds, "attention_config"),
        "parallel": identity.canonical(_parallel_identity(vllm_config.parallel_config)),
        "speculative": _speculative(vllm_config.speculative_config),
    }


def _states(vllm_config: Any) -> str:
    """What of the settings chooses how a state is kept (its shape is in the rank's layout)."""
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout

    cache, mamba = vllm_config.cache_config, vllm_config.mamba_config
    types = [cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype]
    return identity.canonical([*types, get_conv_state_layout(), mamba.backend], "mamba_config")


def _adapters(lora: Any) -> str:
    """Settings that change what LoRA adapters compute, of an engine that has some."""
    return "" if lora is None else identity.canonical([getattr(lora, n) for n in LORA.split()])


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
    """Device kind, and what chooses the kernels and with them what pages hold: a GPU's compute
    capability, a CPU's instruction sets. Raises ``identity.Indescribable``.

    Between generations of GPUs vLLM changes attention backends, how quantized pages keep their
    scales (in equal layouts and sizes) and how exact they are. Cards of one capability share, as
    they do within one engine.
    """
    if device_kind() != "cpu":
        capability = _capability()
        if capability is None:
            raise identity.Indescribable("the device's compute capability cannot be read")
        return identity.canonical([_device_name(), *capability])
    sets = (torch.cpu._is_avx512_supported(), torch.cpu._is_amx_tile_supported())
    capability = torch.backends.cpu.get_cpu_capability()
    return identity.canonical([device_kind(), platform.machine(), capability, sets])


def _speculative(config: Any) -> str:
    """The draft model's layers share the cache, so its weights are part of the bytes."""
    if config is None:
        return ""
    weights = _weights(draft) if (draft := config.draft_model_config) is not None else ""
    return identity.canonical([config.method, config.num_speculative_tokens, weights])
