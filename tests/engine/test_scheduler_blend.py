"""Blend in vLLM, without an engine: what is refused at the start, each with its reason, and what
vLLM's real scheduler does with blended requests."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm

from kvass.blend import plan
from kvass.blend.plan import FirstK, Prompt
from kvass.connectors.vllm import (
    adapt,
    blend_pages,
    blend_planner,
    blend_setup,
    borrowed,
    namespace,
)
from kvass.connectors.vllm.blend_connector import BlendConnector
from kvass.connectors.vllm.blend_oracle import KeptSegments
from kvass.connectors.vllm.entry import KvassConnector
from kvass.connectors.vllm.hints import MOST_LOADED
from kvass.engine.boundary import Boundary
from kvass.errors import UsageError
from kvass.messages import Segment, Segments
from kvass.types import GroupLayout
from tests.support.vllm.fake_client import FakeClient, split
from tests.support.vllm.process import EngineProcess
from tests.support.vllm.scheduler import (
    BLOCK,
    CHUNK,
    SchedulerHarness,
    before,
    make_configs,
    read_setup,
    rig,
)

pytestmark = pytest.mark.skipif(
    before("0.32") or not before("0.33"), reason="blend is for vLLM 0.32 alone"
)

FULL = GroupLayout("full", 32, ("layer",), (4096,))


def configs(blend: str = "first_k:16", oracle: bool = False, **options: Any) -> tuple[Any, Any]:
    """Of an engine that has all that blend needs; ``options`` as for ``make_configs``."""
    ours: dict[str, object] = {"kvass.blend": blend, "kvass.blend_oracle": oracle}
    config, caches = make_configs(ours, **options)
    scheduler = "kvass.connectors.vllm.blend.BlendScheduler"
    config.scheduler_config.scheduler_cls = scheduler
    config.scheduler_config.async_scheduling = False
    config.compilation_config.cudagraph_mode = vllm.config.CUDAGraphMode.NONE
    return config, caches


def refuse(config: Any, *layouts: GroupLayout, blend: str = "none") -> str:
    with pytest.raises(UsageError) as refused:
        blend_setup.read_selection(blend, False, config, layouts or [FULL])
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_what_it_needs() -> None:
    assert read_setup(*configs()).blend == FirstK(16)
    assert read_setup(*configs("kv_dev:0.1", oracle=True)).blend == 0.1
    assert read_setup(*make_configs()).blend is None


def test_the_connector_without_blend_imports_nothing_of_it() -> None:
    assert EngineProcess.template is not None
    run = EngineProcess.template.fork(["tests.support.vllm.blend_imports"], os.environ, stderr=2)
    status, said = run.ran()
    assert status == 0
    without, control = said.splitlines()[-2:]
    assert without == "[]"
    assert "kvass.blend.plan" in control


def test_the_options_choose_the_class() -> None:
    for (config, caches), kind in [(configs(), BlendConnector), (make_configs(), KvassConnector)]:
        connector = KvassConnector(config, adapt.KVConnectorRole.SCHEDULER, caches)
        assert type(connector) is kind
        connector.shutdown()


CHANGES: dict[str, Callable[[Any], object]] = {
    "--scheduler-cls kvass": lambda c: setattr(c.scheduler_config, "scheduler_cls", None),
    "asynchronous": lambda c: setattr(c.scheduler_config, "async_scheduling", True),
    "CUDA graphs": lambda c: setattr(
        c.compilation_config, "cudagraph_mode", vllm.config.CUDAGraphMode.FULL
    ),
    "speculative": lambda c: setattr(c, "speculative_config", SimpleNamespace()),
    "several ranks": lambda c: setattr(c.parallel_config, "world_size", 2),
    "LoRA": lambda c: setattr(c, "lora_config", SimpleNamespace()),
    "do not generate": lambda c: setattr(c.model_config, "runner_type", "pooling"),
    "fp8": lambda c: setattr(c.cache_config, "cache_dtype", "fp8_e4m3"),
}


@pytest.mark.parametrize("reason", CHANGES)
def test_an_engine_is_refused_with_the_reason(reason: str) -> None:
    config, _ = configs()
    CHANGES[reason](config)
    assert reason in refuse(config)


def test_models_versions_and_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = configs()
    assert "sliding_window" in refuse(config, GroupLayout("sliding_window", 32, ("l",), (1,), 64))
    assert "state" in refuse(config, FULL, GroupLayout("state", 32, ("l",), (1,)))
    assert "several KV cache groups" in refuse(config, FULL, FULL)
    assert "kv_dev:0.1" in refuse(config, blend="kv_dev:0.1")
    assert "first_k:TOKENS" in refuse(config, blend="some")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert "model runner V2" in refuse(config)
    monkeypatch.undo()
    monkeypatch.setattr(vllm, "__version__", "0.31.0")
    assert "never tried with vLLM 0.31.0, only 0.32.0" in refuse(config)
    monkeypatch.undo()
    monkeypatch.setattr(namespace, "device_kind", lambda: "cuda")
    assert "'cuda'" in refuse(config)


def test_pages_that_layers_share_are_placed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(borrowed, "model", object)
    monkeypatch.setattr(blend_pages, "_rope", lambda *_: None)
    monkeypatch.setattr(blend_pages, "LayerPages", lambda name, *_: SimpleNamespace(name=name))
    targets = {"0": None, "1": None, "2": "0"}
    layers = {
        name: SimpleNamespace(kv_sharing_target_layer_name=to) for name, to in targets.items()
    }
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    caches = {name: torch.zeros(1) for name in layers}  # vLLM registers those of all layers
    placer = blend_pages.Placer(config, caches, BLOCK, Boundary())
    assert [layer.name for layer in placer._layers] == ["0", "1"]


class FakeSegments:
    """A ``SegmentClient`` without a daemon. ``index``: by space and tokens, a chunk's digest,
    where it stands, and the digest of the chunk before it."""

    def __init__(self, *_: object) -> None:
        self.index: dict[tuple[bytes, bytes], tuple[bytes, int, bytes]] = {}
        self.searched: list[str] = []

    def index_chunks(
        self, space: bytes, digests: bytes, width: int, tokens: bytes, start: int, before: bytes
    ) -> bool:
        """Keep them."""
        for digest, text in zip(split(digests, width), split(tokens, 4 * CHUNK), strict=True):
            self.index[space, text] = digest, start, before
            start, before = start + CHUNK, digest
        return True

    def find_segments(
        self, request: str, space: bytes, tokens: bytes, width: int, first: int
    ) -> Segments:
        """What is indexed, from left to right."""
        self.searched.append(request)
        found, digests, at = list[Segment](), b"", first
        while 4 * (at + CHUNK) <= len(tokens):
            text = tokens[4 * at : 4 * (at + CHUNK)]
            if entry := self.index.get((space, text)):
                found.append(Segment(at, entry[1], CHUNK, entry[2]))
                digests += entry[0]
            at += CHUNK if entry else 1
        return Segments(segments=tuple(found), digests=digests)

    def abandon(self, request: str) -> None:
        """Nothing is pending."""


DOCUMENT = range(1000, 1000 + 2 * CHUNK)


@pytest.fixture
def blending(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> tuple[FakeClient, SchedulerHarness, FakeSegments]:
    """An engine that stored ``DOCUMENT``, and has it no more itself."""
    segments = FakeSegments()
    monkeypatch.setattr(blend_planner, "SegmentClient", lambda *_: segments)
    client, world = rig(configs=configs(**getattr(request, "param", {"blend": "none"})))
    world.add("document", DOCUMENT, max_tokens=1)
    world.run(client)
    assert world.scheduler.reset_prefix_cache()
    assert len(segments.index) == 2
    return client, world, segments


def blend(world: SchedulerHarness, name: str, tokens: list[int]) -> Any:
    """A request that found segments, which are in place."""
    request = world.add(name, tokens)
    output, work = world.schedule()
    (placement,) = work.placements
    assert placement.request == name
    world.finish(output, received=[name])
    return request


def test_of_a_blended_request_vllm_caches_and_announces_what_is_exact(
    blending: tuple[FakeClient, SchedulerHarness, FakeSegments],
) -> None:
    client, world, segments = blending
    before = 2 * BLOCK + 3
    request = blend(world, "b", [*range(before), *DOCUMENT, *range(500, 550)])
    while request.num_output_tokens < 3:
        world.step()
    (table,) = world.scheduler.kv_cache_manager.get_block_ids("b")
    cached = [world.pool.blocks[block].block_hash is not None for block in table]
    assert cached == [True] * 2 + [False] * (len(table) - 2)
    world.scheduler.reset_prefix_cache(reset_running_requests=True)
    output, _ = world.schedule()
    assert output.num_scheduled_tokens == {"b": request.num_tokens}, "it is blended once"
    world.finish(output)
    world.run(client)
    items = [item for reserve in client.reserves for item in reserve]
    offered = {digest for item in items for digest in split(item.digests, 32)}
    assert offered == {entry[0] for entry in segments.index.values()}
    assert request.block_hashes[CHUNK // BLOCK - 1] in offered, "what is exact"
    assert len(offered) == 2 + 1


@pytest.mark.parametrize(
    ("blending", "steps"),
    [
        ({"blend": "none", "oracle": True, "batched": 96}, 2),
        ({"blend": "kv_dev:0.5", "oracle": True, "batched": 96}, 0),
        ({"blend": "kv_dev:0.5", "oracle": True}, 1),
    ],
    indirect=["blending"],
)
def test_the_oracle_replaces_while_segments_are_computed(
    blending: tuple[FakeClient, SchedulerHarness, FakeSegments], steps: int
) -> None:
    _, world, _ = blending
    request = blend(world, "b", [*range(64), *DOCUMENT, *range(500, 600)])
    replaced = list[list[str]]()
    while request.num_output_tokens < 3:
        replaced.append(world.step().replaced)
    assert replaced == [["b"]] * steps + [[]] * (len(replaced) - steps)


def test_kv_dev_computes_the_tokens_that_deviate_most() -> None:
    at, stored = np.arange(10, 20), (torch.zeros(10, 2, 4), torch.zeros(10, 2, 4))
    prompt = Prompt(25, 0, (plan.PlacedSegment(10, 0, 10),))
    one = KeptSegments(prompt, 0.25, at, None, [stored, stored])
    k, v = torch.rand(10, 2, 4), torch.rand(10, 2, 4)
    k[3, 1, 2], v[7, 0, 0], k[8, 0, 0] = 5, 6, 7
    one.choose_deviating(k, v)
    assert one.replaced.tolist() == [0, 1, 2, 4, 5, 6, 9]


def test_prompt_embeddings_are_neither_indexed_nor_searched(
    blending: tuple[FakeClient, SchedulerHarness, FakeSegments], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, world, segments = blending
    indexed, searched = dict(segments.index), list(segments.searched)
    track = world.connector.on_new_request

    def with_embeds(request: Any) -> None:  # of some tokens: the others have their ids
        request.prompt_embeds = torch.zeros(request.num_tokens, 8)
        track(request)

    monkeypatch.setattr(world.connector, "on_new_request", with_embeds)
    world.add("b", [0] * (3 * CHUNK) + [*DOCUMENT, 7])
    world.run(client)
    assert (segments.index, segments.searched) == (indexed, searched)


@pytest.mark.parametrize(("params", "searches"), [({MOST_LOADED: 500}, []), (None, ["b"])])
def test_a_request_that_limits_what_is_loaded_gets_no_segments(
    blending: tuple[FakeClient, SchedulerHarness, FakeSegments],
    params: dict[str, Any] | None,
    searches: list[str],
) -> None:
    _, world, segments = blending
    segments.searched.clear()
    world.add("b", [0, *DOCUMENT, 7], params=params)
    world.step()
    assert segments.searched == searches
