"""The reader of vLLM's configuration: a ``VllmSetup``, or the reason to run uncached.

A file of vLLM's version (see ``adapt.py``).

Facts relied on:

- ``parallel_config.rank`` numbers the workers of an engine. Tensor-parallel ranks are consecutive,
  and each run of ``kv_tp_replicas`` of them holds equal KV.
- With decode context parallelism a block id stands for ``block_size * dcp`` tokens. Each rank's
  page holds its share of them.
- A data-parallel rank is an engine of its own, with its own ``engine_id``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from logging import INFO, WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import vllm

from kvass.client.parallel import ParallelStrategy
from kvass.config import EngineOptions
from kvass.connectors.vllm import borrowed, groups, making, namespace, weight_files
from kvass.connectors.vllm.contract import release
from kvass.connectors.vllm.opt_in import is_seeded_at_random
from kvass.connectors.vllm.served import Verdict, loads_in_step, verdict_on
from kvass.engine import identity, weights
from kvass.engine.boundary import log
from kvass.engine.options import gather, read
from kvass.engine.setup import Admission, EngineSetup, Inert, choose_chunk_tokens
from kvass.errors import ConfigError
from kvass.layout.windows import default_interval
from kvass.transfer import DEVICES
from kvass.types import MAX_RANKS, GroupLayout, chunk_blocks

ALONE: Final = ("kvass.blend", "kvass.blend_oracle", "kvass.shadow")
"""Options that need all ranks on one machine."""

if TYPE_CHECKING:
    from kvass.blend.plan import Selection


def read_options(extra: Mapping[str, Any]) -> EngineOptions:
    """The options in ``extra``, the connector's extra config, in the environment and in the file.
    Raises :class:`ConfigError` for an unknown ``kvass.*`` key, a wrong type or a wrong value."""
    return read(extra, EngineOptions, os.environ)


def log_sources(vllm_config: Any) -> None:
    """Log which source of an option wins over another one, and which names are unknown. Called once
    in an engine. Raises :class:`ConfigError`."""
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    for line in gather(extra, EngineOptions, os.environ)[1]:
        log.warning("%s", line)


@dataclass(frozen=True, kw_only=True)
class VllmSetup(EngineSetup):
    """What both sides of the connector know of a vLLM engine.

    ``global_media_ids``: whether an id that a client gives to an image or other media item means
    the same content in all engines. ``dtype``: the model's data type. ``blend``: which tokens of
    segments are computed again; None if segments are not reused. ``blend_oracle``: whether the
    engine computes all tokens but answers as blend would.
    """

    global_media_ids: bool = False
    dtype: Any = None
    blend: Selection | None = None
    blend_oracle: bool = False


def read_setup(vllm_config: Any, kv_cache_config: Any) -> VllmSetup | Inert:
    """The setup of this engine, or :class:`Inert` for a model or an environment that is not
    supported.

    Raises :class:`ConfigError` for what the operator must correct: an option, the role or the hash
    algorithm.
    """
    transfer = vllm_config.kv_transfer_config
    options = read_options(transfer.kv_connector_extra_config)
    verdict = _verdict()
    if not verdict.caches:
        return Inert(verdict.message)
    if verdict.message:
        _warn_once(verdict.message)
    if not transfer.is_kv_consumer:
        raise ConfigError(f"kv_role {transfer.kv_role}: use kv_both, or kv_consumer to only read")
    _check_hash_algorithm(vllm_config.cache_config.prefix_caching_hash_algo)
    from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size

    parallel = vllm_config.parallel_config
    dcp = parallel.decode_context_parallel_size
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    blocks = tuple(resolve_dcp_kv_block_size(spec, dcp) for spec in specs)
    unit = math.lcm(*blocks, getattr(kv_cache_config, "cache_hit_alignment_tokens", None) or 1)
    has_states = groups.has_states(kv_cache_config)
    chunk_tokens = choose_chunk_tokens(options.chunk_tokens, unit, has_states)
    if reason := next(_unsupported(vllm_config, kv_cache_config), ""):
        return Inert(reason)
    hash_tokens = _hash_tokens(vllm_config, kv_cache_config, blocks)
    try:
        layouts = groups.read_groups(kv_cache_config, blocks)
        groups.page_formats(kv_cache_config)  # if it raises, raise here and not later in a worker
        tokens = f"{chunk_tokens}/{blocks}/{hash_tokens}"
        fields = namespace.describe(
            vllm_config, kv_cache_config, vllm.__version__, tokens, options.tag
        )
        adapters = namespace.adapter_settings(vllm_config.lora_config)
        # An API server has no engines of its own: ``data_parallel_size_local`` is 0 there.
        ranks = parallel.world_size * parallel.data_parallel_size_local
        weights_name = weights.begin(
            weight_files.sources(vllm_config, options.model_id),
            max(1, ranks),
            making.since_ns(vllm_config),
        )
    except (groups.Unsupported, identity.Indescribable) as error:
        return Inert(str(error))
    tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    replicas = getattr(kv_cache_config, "kv_tp_replicas", 1)  # vLLM before 0.31 has no such field
    spare = _spare_chunks(vllm_config, kv_cache_config, chunk_tokens)
    each_block = hash_tokens == blocks[0] == unit and not spare
    blend = None
    if options.blend or options.blend_oracle:
        if options.shadow:
            raise ConfigError("kvass.shadow does not work with kvass.blend: use one of them")
        from kvass.connectors.vllm.blend_setup import read_selection

        blend = read_selection(options.blend, options.blend_oracle, vllm_config, layouts)
    model = vllm_config.model_config
    source = str(model.model_weights or model.model)  # a URL, a path, or a name on the Hub
    source = os.path.realpath(source) if os.path.exists(source) else source
    return VllmSetup(
        socket=options.socket,
        daemon_uid=options.daemon_uid,
        instance=transfer.engine_id,
        identity={name: identity.short(text) for name, text in fields.items()},
        strategy=ParallelStrategy(tp=tp, pp=pp, replicas=replicas),
        chunk_tokens=chunk_tokens,
        hash_tokens=hash_tokens,
        groups=layouts,
        loads=transfer.is_kv_consumer,
        stores=transfer.is_kv_producer,
        spare=spare,
        chunk_blocks=chunk_blocks(layouts, chunk_tokens) if each_block else 0,
        skip_slow_loads=options.skip_slow_loads and not blend,
        window_interval=_window_interval(options, vllm_config, layouts),
        fixed_weights=options.fixed_weights,
        one_queue=_has_one_queue(layouts),
        admission=_admission(vllm_config, layouts, groups.rings(kv_cache_config)),
        early_lookups=options.early_lookups,
        tier_events_s=options.tier_events,
        by_priority=vllm_config.scheduler_config.policy == "priority",
        adapters=adapters,
        global_media_ids=options.global_media_ids,
        dtype=model.dtype,
        answers=None if options.generated == "auto" else options.generated == "on",
        thinks=bool(vllm_config.structured_outputs_config.reasoning_parser),
        blend=blend,
        blend_oracle=options.blend_oracle,
        shadow=float(options.shadow),
        verification=replace(verdict.verification, every=options.verify),
        gpu_stages=options.gpu_stages,
        several_nodes=on_several_machines(vllm_config),
        sync_load_s=0.0 if blend else _sync_load_s(options),
        model=options.model_id or source,
        weights=weights_name,
    )


def _window_interval(
    options: EngineOptions, vllm_config: Any, layouts: tuple[GroupLayout, ...]
) -> int:
    """``EngineSetup.window_interval``: the option's; else vLLM's own interval, if it was set. There
    None is dense, and 0, the default, keeps no window but those where hits are likely to end."""
    if (wanted := options.window_interval) is not None:
        return 0 if wanted == "dense" else wanted
    own = getattr(vllm_config.cache_config, "prefix_cache_retention_interval", 0)
    return 0 if own is None else own or default_interval(layouts)


def _sync_load_s(options: EngineOptions) -> float:
    """``EngineSetup.sync_load_s`` without blend, whose loads are asynchronous."""
    return options.sync_load_ms / 1000 * loads_in_step(_package(), vllm.__version__)


def _has_one_queue(layouts: tuple[GroupLayout, ...]) -> bool:
    """``EngineSetup.one_queue``. Since 0.31 vLLM comes to requests whose load has ended before all
    others. But of windows and states a failed load needs more blocks to compute than vLLM reserved
    to load, so such a request may stop those of its kind behind it."""
    return release(vllm.__version__) < (0, 31) or any(not one.rules.whole for one in layouts)


def _admission(
    vllm_config: Any, layouts: tuple[GroupLayout, ...], rings: frozenset[int]
) -> Admission | None:
    """``EngineSetup.admission``. Before 0.31 vLLM counts no blocks for drafts. In all versions it
    counts too few for windows: from the most blocks that a request may hold in a window it
    subtracts its block table, in which blocks before the window have empty places."""
    drafts = vllm_config.num_speculative_tokens
    uncounted = drafts and release(vllm.__version__) < (0, 31)
    windowed = {number for number, one in enumerate(layouts) if one.rules.windowed}
    if not uncounted and not windowed - rings:
        return None
    return Admission(
        step_tokens=vllm_config.max_in_flight_tokens,
        # as vLLM counts since 0.31: the last token, drafts that are verified, and the next ones
        draft_tokens=1 + 2 * drafts if drafts else 0,
        rings=rings,
    )


def asks_for(vllm_config: Any, option: str) -> bool:
    """Whether ``option`` is set. Its value is not checked here."""
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    options, _ = gather(extra, EngineOptions, os.environ)
    return bool(options.get(option))


def on_several_machines(vllm_config: Any) -> bool:
    """Whether the engine's ranks may use other daemons than its scheduler."""
    several = vllm_config.parallel_config.nnodes_within_dp > 1
    return several or asks_for(vllm_config, "kvass.several_machines")


def _verdict() -> Verdict:
    """The verdict on this process's vLLM. Call it before anything else of vLLM is used."""
    return verdict_on(_package(), vllm.__version__)


def _package() -> Path:
    """The folder of vLLM's package."""
    return Path(vllm.__file__ or "").parent


@cache
def _warn_once(text: str) -> None:
    log.warning("%s", text)


def _hash_tokens(vllm_config: Any, kv_cache_config: Any, blocks: tuple[int, ...]) -> int:
    """The number of tokens of one block hash. vLLM before 0.32 has no ``hash_block_size``."""
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    if tokens := getattr(kv_cache_config, "hash_block_size", None):
        return int(tokens)
    if len(blocks) == 1:
        return blocks[0]
    return int(resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])


def _check_hash_algorithm(algorithm: str) -> None:
    if is_seeded_at_random(algorithm):
        raise ConfigError(
            f"prefix-caching hash algorithm {algorithm} is seeded at random in each process: "
            "set PYTHONHASHSEED to the same number for all engines, or use sha256"
        )


def wanted_layout(vllm_config: Any) -> str | None:
    """vLLM's name of the KV cache layout that the options ask for.

    In these layouts blocks are outermost, so a block of all layers is one piece of memory. None if
    the options ask for no layout, or if the engine does not use the cache. vLLM uses the layout
    unless one of its own settings decides. Raises :class:`ConfigError`.
    """
    options = read_options(vllm_config.kv_transfer_config.kv_connector_extra_config)
    wanted = options.kv_layout
    if not wanted or not _verdict().caches:
        return None
    if wanted != "blocks":
        return wanted
    # Blackwell's kernels need the heads of a block outside of its tokens.
    capability = namespace.capability()
    return "BLHNC" if capability is not None and capability[0] >= 10 else "BLNHC"


def recompute_failed_loads(vllm_config: Any) -> None:
    """Set vLLM's policy for failed loads to ``recompute``. The scheduler reads the policy after it
    has made its connector, so this comes in time."""
    all_configs = borrowed.transfer_configs(vllm_config)
    failing = [c for c in all_configs if c.kv_load_failure_policy == "fail"]
    for config in failing:
        config.kv_load_failure_policy = "recompute"
    if failing:
        others = any(config.kv_connector == "MultiConnector" for config in failing)
        log.log(
            WARNING if others else INFO,
            "kv_load_failure_policy is now recompute%s: what a load of kvass does not bring is "
            "computed",
            " for all connectors" if others else "",
        )


def _connectors_that_must_fail(vllm_config: Any) -> list[str]:
    """The connectors of a MultiConnector whose options set the policy ``fail``. The engine's own
    policy does not count: ``fail`` is its default, so the operator may not have chosen it."""
    all_configs = borrowed.transfer_configs(vllm_config)
    multi = [c for c in all_configs if c.kv_connector == "MultiConnector"]
    children = [child for c in multi for child in c.kv_connector_extra_config["connectors"]]
    return [c["kv_connector"] for c in children if c.get("kv_load_failure_policy") == "fail"]


def _spare_chunks(vllm_config: Any, kv_cache_config: Any, chunk_tokens: int) -> int:
    """The number of chunks after a hit that must also be cached.

    A drafter that reads the model's hidden states (EAGLE, MTP) computes the KV of a token from the
    tokens after it. So vLLM does not use the last block of a match, but that block must be cached.
    """
    speculative = vllm_config.speculative_config
    flagged = any(group.is_eagle_group for group in kv_cache_config.kv_cache_groups)
    if not flagged and (speculative is None or not speculative.use_eagle_block_drop()):
        return 0
    # vLLM before 0.31 does not say how many. There are at most as many as the drafter proposes.
    most = vllm_config.num_speculative_tokens
    lookahead = int(getattr(vllm_config, "num_prefill_lookahead_tokens", most))
    return -(-max(1, lookahead) // chunk_tokens)


def _unsupported(vllm_config: Any, kv_cache_config: Any) -> Iterator[str]:
    """The reasons why this engine is not supported."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    if parallel.prefill_context_parallel_size > 1:
        yield "prefill context parallelism is not supported"
    if ranks > MAX_RANKS:
        yield f"an engine of {ranks} ranks is not supported; at most {MAX_RANKS}"
    if ranks > 1 and _launched_elsewhere(vllm_config):
        # Each rank has a scheduler of its own, and all of them must decide alike. A hit does not.
        yield "external_launcher with several ranks is not supported: each has its own scheduler"
    alone = [name for name in ALONE if asks_for(vllm_config, name)]
    if alone and on_several_machines(vllm_config):
        yield f"{alone[0]} in an engine whose ranks are on several machines is not supported"
    if names := _connectors_that_must_fail(vllm_config):
        yield (
            f"kv_load_failure_policy is fail for {', '.join(names)}, and vLLM has one policy for "
            "all connectors: a failed load of kvass must be recomputed. Remove it, or set recompute"
        )
    kind = namespace.device_kind()
    if kind not in DEVICES:
        yield f"device {kind!r} is not supported yet; supported: {', '.join(sorted(DEVICES))}"
    # In vLLM before 0.32 this is a setting of the model.
    parts = [getattr(vllm_config, "aux_output_config", None), model]
    if any(getattr(part, "enable_return_routed_experts", False) for part in parts):
        yield "--enable-return-routed-experts is not supported: of a hit vLLM has none, and raises"
    if not kv_cache_config.kv_cache_groups:
        yield "a model without KV cache has nothing to share"
    # Earlier pipeline stages learn some steps later which drafts were accepted, and correct their
    # states only then. A state may already have been stored by that time.
    drafts = vllm_config.speculative_config is not None
    if drafts and parallel.pipeline_parallel_size > 1 and groups.has_states(kv_cache_config):
        yield "a model with states, pipeline stages and speculative decoding is not supported"
    # vLLM caches no prefix for these models, but calls a connector. A prompt that is pooled from
    # its first token or from all tokens must be computed whole. A token that attends to later
    # tokens has KV that depends on them. We do not check whether vLLM's own cache is on: it may be
    # off for other reasons.
    never = "vLLM supports no prefix caching for it"
    if groups.any_non_causal(kv_cache_config):
        yield f"a model with attention that is not causal is not supported: {never}"
    if not model.is_prefix_caching_supported:
        pooled = f", pooled by {_pooling_of(model.pooler_config)}" if model.pooler_config else ""
        yield f"a model of this kind ({model.attn_type}{pooled}) is not supported: {never}"


def _launched_elsewhere(vllm_config: Any) -> bool:
    """Whether ``torchrun`` or the like launches each rank, with a scheduler of its own."""
    backend = vllm_config.parallel_config.distributed_executor_backend
    if not isinstance(backend, type) and "." not in str(backend):  # a short name of vLLM's
        return bool(backend == "external_launcher")
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    return issubclass(Executor.get_class(vllm_config), ExecutorWithExternalLauncher)


def _pooling_of(pooler: Any) -> str:
    """The pooling type that makes this model's prefixes uncacheable. vLLM sets both types, one of
    them to a default that it does not use. Of the types for single tokens only STEP prevents
    caching."""
    if pooler.tok_pooling_type == "STEP":
        return "STEP"
    return str(pooler.seq_pooling_type or pooler.tok_pooling_type)


def worker_rank(vllm_config: Any) -> int:
    """The rank of this worker process in its engine. ``external_launcher`` numbers the workers of
    all data-parallel ranks on end."""
    parallel = vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    return int(parallel.rank % ranks if _launched_elsewhere(vllm_config) else parallel.rank)
