"""What the connector makes of an engine's configuration: options, identity, when it is inert."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from kvass._version import TESTED_VLLM
from kvass.client.parallel import ParallelStrategy
from kvass.connectors.vllm import KvassConnector, adapt, configuration, served
from kvass.connectors.vllm.kv_caches import read_memory
from kvass.engine.boundary import Boundary
from kvass.engine.copier import Copier
from kvass.engine.planner import Planner
from kvass.errors import ConfigError, UsageError
from kvass.types import GroupLayout
from tests.support.vllm.fake_client import FakeClient
from tests.support.vllm.hybrid import make_hybrid_configs
from tests.support.vllm.scheduler import (
    FIXED,
    SchedulerHarness,
    inert_reason,
    make_configs,
    make_multi_configs,
    read_setup,
    rig,
)


def setup(**changes: Any) -> Any:
    return read_setup(*make_configs(**changes))


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"kvass.chunk": 256},
            "use one of kvass.blend, kvass.blend_oracle, kvass.chunk_tokens, kvass.daemon_uid, "
            "kvass.early_lookups, kvass.fixed_weights, kvass.generated, "
            "kvass.global_media_ids, kvass.gpu_stages, kvass.kv_layout, kvass.model_id, "
            "kvass.several_machines, kvass.shadow, "
            "kvass.skip_slow_loads, kvass.socket, kvass.sync_load_ms, kvass.tag, "
            "kvass.tier_events, kvass.verify",
        ),
        ({"kvass.daemon_uid": "kvass"}, "Expected `int | null`, got `str`"),
        ({"kvass_socket": "x"}, "unknown option 'kvass_socket'"),
        ({"kvass.chunk_tokens": "256"}, "Expected `int`, got `str`"),
        ({"kvass.chunk_tokens": True}, "Expected `int`, got `bool`"),
        ({"kvass.chunk_tokens": 2.5}, "Expected `int`, got `float`"),
        ({"kvass.chunk_tokens": 0}, "Expected `int` >= 1"),
        ({"kvass.chunk_tokens": 40}, "give a multiple of 16"),
        ({"kvass.tag": None}, "Expected `str`, got `null`"),
        ({"kvass.model_id": ""}, "Expected `str` of length >= 1 - at `$.kvass.model_id`"),
        ({"kvass.kv_layout": "BHLNC"}, "Invalid enum value 'BHLNC' - at `$.kvass.kv_layout`"),
        ({"kvass.kv_layout": "one"}, "docs/vllm.md lists their values"),
        ({"kvass.global_media_ids": "yes"}, "Expected `bool`, got `str`"),
    ],
)
def test_a_wrong_option_stops_the_start(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SchedulerHarness(None, options=options)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_connectors_options_are_left_alone() -> None:
    assert setup(options={"shared_storage_path": "/x"}).chunk_tokens == 32


def test_an_option_without_its_prefix_is_said(caplog: pytest.LogCaptureFixture) -> None:
    setup(options={"tag": "x"})
    assert "write it 'kvass.tag'" in caplog.text


def test_both_sides_of_an_engine_know_the_user_of_the_daemon() -> None:
    import torch

    configs = make_configs(blocks=8, options={"kvass.daemon_uid": 54_321})
    one = read_setup(*configs)
    planner, copier = Planner(one, Mock()), Copier(one, 0, Boundary())
    (tensor,) = configs[1].kv_cache_tensors
    pages = torch.zeros(tensor.size, dtype=torch.uint8)
    each = {name: pages[i * tensor.layer_stride :] for i, name in enumerate(tensor.layers)}
    copier.attach(read_memory(configs[1], each, 32, GROUPS))
    for client in (planner.client, copier._client):
        assert client is not None
        assert client._daemon_uid == 54_321
    planner.close()
    copier.close()


def test_the_default_chunk_is_the_smallest_multiple_from_256() -> None:
    config, caches = make_configs()
    del config.kv_transfer_config.kv_connector_extra_config["kvass.chunk_tokens"]
    found = read_setup(config, caches)
    assert found.chunk_tokens == 256
    caches.cache_hit_alignment_tokens = 96
    found = read_setup(config, caches)
    assert found.chunk_tokens == 288


@pytest.mark.parametrize("mixed", [False, True])
def test_a_stage_without_a_groups_layers_knows_its_kind(mixed: bool) -> None:
    """Or its ranks would contradict the scheduler, which has the first stage's configuration."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    config, caches = make_hybrid_configs({}, [("state", 16, 0, 1), ("full", 16, 0, 1)])
    del config.kv_transfer_config.kv_connector_extra_config["kvass.chunk_tokens"]
    first = read_setup(config, caches)
    assert first.chunk_tokens == 16
    group = caches.kv_cache_groups[0]
    if mixed:
        each = {group.layer_names[0]: group.kv_cache_spec}
        group.kv_cache_spec = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=each)
    group.layer_names = []
    later = read_setup(config, caches)
    assert (later.chunk_tokens, later.identity) == (first.chunk_tokens, first.identity)
    assert [one.kind for one in later.groups] == [one.kind for one in first.groups]


def test_a_producer_that_never_reads_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_consumer"):
        setup(kv_role="kv_producer")


def test_a_hash_seeded_at_random_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config, caches = make_configs()
    config.cache_config.prefix_caching_hash_algo = "xxhash"
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ConfigError, match="set PYTHONHASHSEED"):
        configuration.read_setup(config, caches)
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    one = read_setup(config, caches)
    monkeypatch.setenv("PYTHONHASHSEED", "2")
    two = read_setup(config, caches)
    assert one.identity["hash"] != two.identity["hash"]


# ---------------------------------------------------------------- inert


def ring(config: Any, caches: Any) -> None:
    from vllm.v1.kv_cache_interface import CircularBufferSpec

    spec = caches.kv_cache_groups[0].kv_cache_spec
    caches.kv_cache_groups[0].kv_cache_spec = CircularBufferSpec(
        block_size=16, num_kv_heads=2, head_size=32, dtype=spec.dtype
    )


def ephemeral(config: Any, caches: Any) -> None:
    caches.kv_cache_groups[0].enable_kv_transfer = False


def states_of_a_request(config: Any, caches: Any) -> None:
    from vllm.v1.kv_cache_interface import MambaSpec

    caches.kv_cache_groups[0].kv_cache_spec = MambaSpec(
        block_size=16, shapes=((2, 2),), dtypes=(caches.kv_cache_groups[0].kv_cache_spec.dtype,)
    )


def looks_ahead(config: Any, caches: Any) -> None:
    group = caches.kv_cache_groups[0]
    group.kv_cache_spec = replace(group.kv_cache_spec, non_causal=True)


def pooled(kind: str) -> Any:
    from vllm.config.pooler import PoolerConfig

    def change(config: Any, caches: Any) -> None:
        config.model_config.pooler_config = PoolerConfig(pooling_type=kind)

    return change


def pooled_by_step(config: Any, caches: Any) -> None:
    """As vLLM leaves it: the type that is not used has the model's default."""
    pooled("STEP")(config, caches)
    config.model_config.pooler_config.seq_pooling_type = "LAST"


def prefill_split(config: Any, caches: Any) -> None:
    config.parallel_config.prefill_context_parallel_size = 2


def too_many_ranks(config: Any, caches: Any) -> None:
    config.parallel_config.tensor_parallel_size = 43
    config.parallel_config.pipeline_parallel_size = 3


def two_machines(config: Any, caches: Any) -> None:
    config.parallel_config.nnodes = 2
    config.kv_transfer_config.kv_connector_extra_config["kvass.blend"] = "all"


QUALIFIED = "vllm.v1.executor.uniproc_executor.ExecutorWithExternalLauncher"


def launched_elsewhere(config: Any, caches: Any) -> None:
    config.parallel_config.distributed_executor_backend = "external_launcher"
    config.parallel_config.tensor_parallel_size = config.parallel_config.world_size = 2


def launched_by_name(config: Any, caches: Any) -> None:
    launched_elsewhere(config, caches)
    config.parallel_config.distributed_executor_backend = QUALIFIED


def launched_by_subclass(config: Any, caches: Any) -> None:
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    launched_elsewhere(config, caches)
    kind = type("Mine", (ExecutorWithExternalLauncher,), {})
    config.parallel_config.distributed_executor_backend = kind


def experts_returned(config: Any, caches: Any) -> None:
    before_0_31 = config.model_config
    getattr(config, "aux_output_config", before_0_31).enable_return_routed_experts = True


def unreadable(config: Any, caches: Any) -> None:
    config.cache_config = None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (ring, "no KV cache group is prefix-cacheable"),
        (ephemeral, "no KV cache group is prefix-cacheable"),
        (states_of_a_request, "mamba_cache_mode"),
        (looks_ahead, "attention that is not causal"),
        (pooled("MEAN"), "pooled by MEAN"),
        (pooled("CLS"), "pooled by CLS"),
        (pooled("STEP"), "pooled by STEP"),
        (pooled_by_step, "pooled by STEP"),
        (prefill_split, "prefill context parallelism"),
        (too_many_ranks, "129 ranks"),
        (two_machines, "several machines"),
        (launched_elsewhere, "external_launcher with several ranks"),
        (launched_by_name, "external_launcher with several ranks"),
        (launched_by_subclass, "external_launcher with several ranks"),
        (experts_returned, "--enable-return-routed-experts is not supported"),
        (unreadable, "reading the engine's configuration failed"),
    ],
)
def test_what_is_not_supported_is_inert_and_says_so_once(
    change: Any, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    config, caches = make_configs()
    change(config, caches)
    for role in (adapt.KVConnectorRole.SCHEDULER, adapt.KVConnectorRole.WORKER):
        connector = KvassConnector(config, role, caches)
        assert connector._planner is None
        assert connector._copier is None
    errors = [r.getMessage() for r in caplog.records if "runs uncached" in r.getMessage()]
    assert len(errors) == 1
    assert says in errors[0]
    assert all(r.levelno == logging.ERROR for r in caplog.records if "uncached" in r.getMessage())
    workers = [r.getMessage() for r in caplog.records if "off in this worker" in r.getMessage()]
    assert len(workers) == 1
    assert says in workers[0]


def test_one_worker_of_several_says_that_it_is_inert(caplog: pytest.LogCaptureFixture) -> None:
    """Its scheduler, which sees the first layer of each group only, may not know."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    for rank in range(2):
        config, caches = make_configs(strategy=ParallelStrategy(tp=2, rank=rank))
        KvassConnector(config, adapt.KVConnectorRole.SCHEDULER, caches).shutdown()
        (group,) = caches.kv_cache_groups
        spec = group.kv_cache_spec
        each = dict.fromkeys(group.layer_names, spec)
        each[group.layer_names[-1]] = replace(spec, non_causal=True)
        group.kv_cache_spec = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=each)
        assert KvassConnector(config, adapt.KVConnectorRole.WORKER, caches)._copier is None
    off = [r.getMessage() for r in caplog.records if "kvass is off" in r.getMessage()]
    assert len(off) == 1
    assert "not causal" in off[0]


@pytest.mark.parametrize("backend", ["external_launcher", QUALIFIED])
def test_data_parallel_engines_of_one_rank_each_are_served_however_launched(backend: str) -> None:
    """vLLM counts the workers of all of them in ``world_size``, and numbers them on end."""
    config, caches = make_configs()
    parallel = config.parallel_config
    parallel.distributed_executor_backend, parallel.data_parallel_size = backend, 2
    parallel.world_size = 2
    parallel.rank = 1
    assert read_setup(config, caches).strategy.ranks == 1
    assert configuration.worker_rank(config) == 0


@pytest.mark.parametrize("kind", ["LAST", "ALL"])
def test_pooling_models_of_which_vllm_caches_prefixes_are_served(kind: str) -> None:
    config, caches = make_configs()
    pooled(kind)(config, caches)
    read_setup(config, caches)


def test_that_vllms_own_cache_is_off_is_no_reason_not_to_serve() -> None:
    """It may be off for reasons that are none of ours: MLA on a CPU, or the operator's."""
    config, caches = make_configs()
    config.cache_config.enable_prefix_caching = False
    read_setup(config, caches)


def test_an_untested_vllm_that_differs_is_inert(monkeypatch: pytest.MonkeyPatch) -> None:
    config, caches = make_configs()
    tested = min(TESTED_VLLM)
    monkeypatch.setattr(served, "_differences", lambda *_: ["a name is gone"])
    for version in ("0.33.1", f"{tested}+ourfork"):
        monkeypatch.setattr("vllm.__version__", version)
        assert f"{version} was never tested" in inert_reason(config, caches)
    monkeypatch.setattr("vllm.__version__", f"{tested}+cpu")
    read_setup(config, caches)


def test_an_inert_engine_runs_uncached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "TESTED_VLLM", frozenset())
    monkeypatch.setattr(served, "_differences", lambda *_: ["a name is gone"])
    client, world = rig()
    request = world.add("a", range(100))
    world.run()
    assert request.num_tokens == 104
    assert client.steps == 0
    assert world.scheduler.reset_prefix_cache(reset_connector=True)


def test_inside_a_multiconnector_failed_loads_are_recomputed_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = FakeClient()
    world = SchedulerHarness(client, configs=make_multi_configs(FIXED))
    assert world.scheduler.recompute_kv_load_failures
    (said,) = [r.getMessage() for r in caplog.records if "failure_policy" in r.getMessage()]
    assert "now recompute for all connectors" in said
    assert world.scheduler.requires_kv_delivery is False
    world.add("a", range(100), max_tokens=1)
    world.run(client)
    assert len(client.rows) == 3
    assert world.scheduler.reset_prefix_cache()
    request = world.add("b", range(100))
    assert len(world.step().loads) == 1
    world.step(failed=["b"])
    output, _ = world.schedule()
    assert output.num_scheduled_tokens == {"b": 100}
    world.finish(output)
    world.run(client)
    assert request.num_tokens == 104


def test_a_connector_that_must_fail_turns_kvass_off(caplog: pytest.LogCaptureFixture) -> None:
    """vLLM has one policy for all connectors. Which one the engine's is, nobody can tell."""
    config, caches = make_multi_configs(FIXED)
    (ours,) = config.kv_transfer_config.kv_connector_extra_config["connectors"]
    ours["kv_load_failure_policy"] = "fail"
    client = FakeClient()
    world = SchedulerHarness(client, configs=(config, caches))
    assert not world.scheduler.recompute_kv_load_failures
    world.add("a", range(100))
    world.run()
    assert client.steps == 0
    (line,) = [r.getMessage() for r in caplog.records if "kvass is off" in r.getMessage()]
    assert "fail for KvassConnector" in line
    assert "set recompute" in line
    ours["kv_load_failure_policy"] = "recompute"
    world = SchedulerHarness(client, configs=(config, caches))
    assert world.scheduler.recompute_kv_load_failures


# ---------------------------------------------------------------- memory


GROUPS = (GroupLayout("full", 16, (), ()),)


def test_planes_that_contradict_the_configuration_are_refused() -> None:
    import torch

    _, caches = make_configs(blocks=8)
    (tensor,) = caches.kv_cache_tensors
    memory = torch.zeros(tensor.size, dtype=torch.uint8)
    second = memory[tensor.layer_stride :]
    found = read_memory(caches, {"layer.0": memory, "layer.1": [second]}, 32, GROUPS)
    assert len(found.regions) == 1
    assert [plane.base for plane in found.planes[0].planes] == [0, tensor.layer_stride]
    assert found.layout.groups[0].shard_bytes(32) == found.planes[0].shard_bytes
    with pytest.raises(UsageError, match=r"layer\.1"):
        read_memory(caches, {"layer.0": memory, "layer.1": memory}, 32, GROUPS)


def test_layers_in_storages_of_their_own_are_regions_of_their_own() -> None:
    import torch

    _, caches = make_configs(blocks=8)
    (tensor,) = caches.kv_cache_tensors
    tensor.layer_stride = 0
    own = {name: torch.zeros(tensor.size, dtype=torch.uint8) for name in tensor.layers}
    found = read_memory(caches, own, 32, GROUPS)
    assert [plane.region for plane in found.planes[0].planes] == [0, 1]
