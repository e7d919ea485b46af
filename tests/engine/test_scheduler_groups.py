"""Models of several layer groups: vLLM's real scheduler, a real daemon, pages of known content."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from kvass.client.parallel import ParallelStrategy
from kvass.connectors.vllm import adapt, configuration
from kvass.connectors.vllm.configuration import VllmSetup
from kvass.connectors.vllm.contract import release
from kvass.engine.setup import Inert
from kvass.testing.daemon import Daemon, running_daemon
from tests.engine import conftest
from tests.engine.conftest import empty
from tests.support.vllm.fake_vllm import installed, version_of
from tests.support.vllm.hybrid import GroupShape, make_hybrid_configs
from tests.support.vllm.ranks import CopyGate, StubModelEngine, making, until

GPT_OSS: list[GroupShape] = [("sliding_window", 16, 40, 2), ("full", 16, 0, 2)]
GEMMA: list[GroupShape] = [
    ("sliding_window", 16, 100, 1),
    ("sliding_window", 16, 100, 1),
    ("full", 16, 0, 1),
]
QWEN_NEXT: list[GroupShape] = [("state", 64, 0, 2), ("full", 64, 0, 2)]
DEEPSEEK_V4: list[GroupShape] = [
    ("full", 64, 0, 2),
    ("sliding_window", 16, 32, 1),
    ("full", 64, 0, 1),
    ("sliding_window", 4, 8, 1),
    ("sliding_window", 8, 32, 1),
]
MIXED: list[GroupShape] = [("state", 64, 0, 1), ("sliding_window", 32, 20, 1), ("full", 64, 0, 2)]
GLM_NEXT: list[GroupShape] = [("full", 64, 0, 2), ("ring", 8, 0, 1)]
DEEPSEEK_V41: list[GroupShape] = [
    ("full", 64, 0, 2),
    ("replayed", 64, 100, 1),
    ("ring", 8, 0, 1),
    ("full", 32, 0, 1),
]
SINCE_0_32 = pytest.mark.skipif(
    release(version_of(installed())) < (0, 32), reason="vLLM computes no window again"
)
MODELS = {
    "gpt-oss": GPT_OSS,
    "gemma": GEMMA,
    "qwen-next": QWEN_NEXT,
    "deepseek-v4": DEEPSEEK_V4,
    "mixed": MIXED,
}
DENSE = {"kvass.window_interval": "dense"}
EIGHT_FULL: list[GroupShape] = [("full", 16, 0, 1)] * 8
EIGHT_MIXED: list[GroupShape] = [
    ("full", 16, 0, 1),
    *(("sliding_window", 16, 40 + i, 1) for i in range(6)),
    ("state", 64, 0, 1),
]
FEW_KEYS = (
    "-c",
    "import sys\n"
    "from kvass.cli.main import main\n"
    "from kvass.core.handlers import granting\n"
    "from kvass.daemon import main as daemon\n"
    "from kvass.types import Limits\n"
    "real, granting.ROWS_A_STEP = daemon.CoreConfig, 16\n"
    "few = Limits(keys_per_message=32)\n"
    "daemon.CoreConfig = lambda **fields: real(**{**fields, 'limits': few})\n"
    "sys.exit(main())",
)
each_model = pytest.mark.parametrize("shapes", MODELS.values(), ids=MODELS)

daemon = conftest.own_daemon


@pytest.fixture
def engine(daemon: Daemon, pages: Iterator[dict[str, Any]]) -> Iterator[Any]:
    def make(shapes: Sequence[GroupShape], **options: Any) -> StubModelEngine:
        options = {"blocks": 400, "batched": 128, "chunk": 64, **next(pages), **options}
        return StubModelEngine(daemon.socket, daemon, shapes=shapes, **options)

    with making(make) as engine:
        yield engine


def finish(engine: StubModelEngine) -> None:
    """Step until nothing is left to do."""
    until(lambda: engine.step() and not engine.world.scheduler.has_requests(), "the end")


def prompt(seed: int, tokens: int) -> list[int]:
    return random.Random(seed).choices(range(60), k=tokens)


@each_model
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_d2_every_group_of_a_hit_is_right(
    daemon: Daemon, engine: Any, shapes: list[GroupShape], asynchronous: bool
) -> None:
    """Lengths around the ends of blocks, windows and chunks; never the whole prompt. Asynchronously
    the grants come late, too: then hits are as long, also if the request has ended meanwhile."""
    a, b = engine(shapes), engine(shapes, asynchronous=asynchronous)
    chunk = b.world.connector._planner._setup.chunk_tokens
    if asynchronous:
        a.delay_grants(lambda: 2)
    for seed, tokens in enumerate((64, 65, 127, 129, 193, 400)):
        a.generate(f"a{seed}", prompt(seed, tokens))
        _, found = b.load(f"b{seed}", prompt(seed, tokens))
        assert found % chunk == 0
        whole = (tokens - 1) // chunk * chunk
        assert found == whole if not any(kind == "state" for kind, *_ in shapes) else found <= whole
        assert found or tokens <= chunk
        finish(b)
        assert b.world.scheduler.kv_cache_manager.reset_prefix_cache()
    empty(daemon)


@pytest.mark.parametrize(
    ("shapes", "replayed"),
    [
        pytest.param(GLM_NEXT, 0, id="ring"),
        pytest.param(DEEPSEEK_V41, 100, id="replayed", marks=SINCE_0_32),
    ],
)
def test_groups_that_vllm_does_not_cache_are_left_to_vllm(
    daemon: Daemon, engine: Any, shapes: list[GroupShape], replayed: int
) -> None:
    """A hit is as long as vLLM's own, and both engines go on from it alike."""
    a, b = engine(shapes), engine(shapes)
    for seed, tokens in enumerate((65, 127, 129, 193, 400)):
        said, whole = prompt(seed, tokens), (tokens - 1) // 64 * 64
        begins = max(0, whole - replayed) if whole > replayed else 0
        a.generate(f"a{seed}", said)
        assert b.load(f"b{seed}", said)[1] == begins
        finish(b)
        assert b.load(f"own {seed}", said)[1] == begins
        finish(b)
        assert b.world.scheduler.kv_cache_manager.reset_prefix_cache()
    stored = daemon.status()["namespaces"][0]["groups"]
    assert [group["rows"] > 0 for group in stored] == [kind == "full" for kind, *_ in shapes]
    assert all(e.world.free_blocks == e.world.pool.num_gpu_blocks - 1 for e in (a, b))
    empty(daemon)


@pytest.mark.parametrize(("shapes", "late"), [(EIGHT_FULL, 2), (EIGHT_MIXED, 1)])
def test_of_eight_groups_a_long_prompt_is_stored_as_far_as_it_is_looked_at(
    tmp_path: Path, pages: Iterator[dict[str, Any]], shapes: list[GroupShape], late: int
) -> None:
    """A daemon of 32 keys a message finds and grants 4 chunks of 8 groups, 2 in a step."""
    options: dict[str, Any] = {"blocks": 1600, "batched": 256, "chunk": 64, "more": DENSE}
    options |= next(pages)
    with running_daemon(tmp_path, l1_size="128MiB", program=FEW_KEYS) as daemon:
        a, b = (StubModelEngine(daemon.socket, daemon, shapes=shapes, **options) for _ in "ab")
        for engine in (a, b):
            engine.wait_connected()
        a.delay_grants(lambda: late)
        a.generate("long", prompt(1, 400), max_tokens=100)
        assert daemon.status()["namespaces"][0]["groups"][0]["rows"] == 4
        assert b.load("long", prompt(1, 400))[1] == 256
        finish(b)
        assert b.load("what it has itself is longer", prompt(1, 450))[1] >= 384
        finish(b)
        a.generate("short", prompt(2, 230))
        assert b.load("short", prompt(2, 230))[1] == (192 if shapes is EIGHT_MIXED else 224)
        finish(b)
        for engine in (a, b):
            assert engine.world.free_blocks == engine.world.pool.num_gpu_blocks - 1
            assert not any(name.startswith("refused") for name in engine.client.counters)
        empty(daemon)
        for engine in (a, b):
            engine.close()


@each_model
def test_any_history_leaves_every_loaded_page_right(
    daemon: Daemon, engine: Any, shapes: list[GroupShape]
) -> None:
    """Two engines, few blocks, several requests at once: windows are reused, requests preempted."""
    rng = random.Random(7)
    engines = [engine(shapes, blocks=150, batched=96, asynchronous=i == 1) for i in range(2)]
    engines[0].delay_grants(lambda: rng.randrange(5))
    trunks = [prompt(100 + i, 400) for i in range(3)]
    loads = 0
    for number in range(40):
        one = rng.choice(engines)
        trunk = rng.choice(trunks)[: rng.randrange(20, 400)]
        said = [*trunk, *prompt(number, rng.randrange(1, 90))]
        if rng.random() < 0.5:
            _, found = one.load(f"r{number}", said)
            loads += found > 0
        else:
            one.world.add(f"r{number}", said, max_tokens=rng.randrange(1, 40))
        for _ in range(rng.randrange(6)):
            one.step()
        if rng.random() < 0.2:
            live = list(one.world.scheduler.requests)
            if live:
                one.world.abort(rng.choice(live))
    for one in engines:
        finish(one)
        assert one.world.free_blocks == one.world.pool.num_gpu_blocks - 1
    assert loads > 3
    empty(daemon)


@pytest.mark.parametrize("late", [False, True], ids=["granted at once", "granted late"])
@pytest.mark.parametrize(
    ("held", "blocks"), [(True, 60), (False, 38)], ids=["held", "negative control"]
)
def test_window_blocks_are_held_until_they_are_copied(
    engine: Any, monkeypatch: pytest.MonkeyPatch, held: bool, blocks: int, late: bool
) -> None:
    """vLLM reuses what left the window in the very next step, while the copy still waits, or the
    grant is still on its way."""
    a, b = engine(GPT_OSS, blocks=blocks, more=DENSE), engine(GPT_OSS)
    if not held:
        monkeypatch.setattr(adapt.VllmBlockPool, "hold", lambda self, ids: [])
        monkeypatch.setattr(adapt.VllmBlockPool, "free", lambda self, held: None)
    if late:
        a.delay_grants(lambda: 2)
    gate = CopyGate(a.rank, shut=True)
    tokens = prompt(5, 380)
    a.world.add("a", tokens, max_tokens=4)
    for _ in range(6):
        a.step()
    gate.open()
    finish(a)
    a.daemon.wait_until(reservations=0)
    with nullcontext() if held else pytest.raises(AssertionError, match="group 0"):
        for chunks in range(1, 6):
            assert b.load(f"b{chunks}", tokens[: chunks * 64 + 1])[1] == chunks * 64
            finish(b)
            assert b.world.scheduler.kv_cache_manager.reset_prefix_cache()


@pytest.mark.parametrize("group", range(3))
def test_the_check_sees_a_page_of_any_group_that_was_not_loaded(engine: Any, group: int) -> None:
    a, b = engine(MIXED), engine(MIXED)
    a.generate("a", prompt(6, 300))
    request, found = b.load("b", prompt(6, 300))
    one = b.world.connector._planner._setup.groups[group]
    last = b.tables("b")[group][one.blocks(one.needs(found), found)[-1]]
    b.rank.page(group, 0, last)[:] = 0
    with pytest.raises(AssertionError, match=f"group {group}"):
        b.verify(request, found)


def test_a_window_takes_its_share_of_the_arena(daemon: Daemon, engine: Any) -> None:
    a = engine(GPT_OSS, more=DENSE)
    a.generate("a", prompt(9, 385))
    window, full = daemon.status()["namespaces"][0]["groups"]
    assert window["rows"] == full["rows"] == 6
    assert window["used_bytes"] / full["used_bytes"] == 3 / 4  # 39 tokens of 64 are 3 blocks of 4


# ---------------------------------------------------------------- states handed over between steps


ALIKE: list[GroupShape] = [("state", 16, 0, 1), ("full", 16, 0, 1)]
DRAFTING: dict[str, Any] = {
    "asynchronous": True,
    "chunk": 16,
    "drafts": 3,
    "draft_states": 3,
    "retention": 16,
}


def hand_over(a: StubModelEngine, max_tokens: int) -> tuple[list[Any], int]:
    """Run a request asynchronously until drafts that were accepted take it past its second chunk:
    what is in flight, and the block of the state there. vLLM tells of it in the next step."""
    world = a.world
    flying: list[Any] = []
    request = world.add("a", range(30), max_tokens=max_tokens)
    for tokens in ([], [7], [8, 9, 10, 11]):
        flying += [world.schedule()[0] for _ in range(2 - len(flying))]
        world.finish(flying.pop(0), tokens=tokens, reported=list(world.open_steps))
    assert request.num_tokens == 35
    (manager, _) = world.scheduler.kv_cache_manager.coordinator.single_type_managers
    ((name, _, block, tokens),) = manager._pending_boundary_state_offloads
    assert (name, tokens) == ("a", 32)
    return flying, block.block_id


@pytest.mark.parametrize("late", [0, 2], ids=["granted at once", "granted late"])
@pytest.mark.parametrize("shapes", [QWEN_NEXT, MIXED], ids=["qwen-next", "mixed"])
def test_a_new_daemon_gets_the_state_that_the_engine_has_itself(
    daemon: Daemon, engine: Any, shapes: list[GroupShape], late: int
) -> None:
    """vLLM reports no state of a prompt that it answers from its own cache."""
    tokens = prompt(3, 400)
    a, b = engine(shapes), engine(shapes)
    a.generate("a", tokens)
    daemon.restart()
    a.wait_connected()
    b.wait_connected()
    a.delay_grants(lambda: late)
    assert a.load("again", tokens)[1] == 384
    finish(a)
    daemon.wait_until(reservations=0)
    stored = {group["kind"]: group["rows"] for group in daemon.status()["namespaces"][0]["groups"]}
    assert (stored["state"], stored["full"]) == (1, 6)
    assert b.load("b", tokens)[1] == 384
    finish(b)
    empty(daemon)


@pytest.mark.parametrize("blocks", [12, 13, 14])
def test_a_state_whose_block_went_to_another_request_is_not_stored(
    engine: Any, blocks: int
) -> None:
    """In the step in which vLLM tells of it, the accepted drafts free it before."""
    a = engine(ALIKE, **DRAFTING | {"blocks": blocks})
    flying, state = hand_over(a, 50)
    full = a.tables("a")[1][1]
    a.world.add("b", range(1000, 1010))
    flying.append(a.world.schedule()[0])
    assert state not in a.tables("a")[0]
    lost = any(state in ids for ids in a.tables("b"))
    assert lost == (blocks == 13), "of 12 b gets none, of 14 it leaves one"
    assert [store.blocks for store in stores(flying)] == [
        ((), (full,)) if lost else ((state,), (full,))
    ]


def test_a_state_of_a_request_that_is_not_scheduled_is_stored(daemon: Daemon, engine: Any) -> None:
    """All tokens it may have are in flight."""
    a = engine(ALIKE, **DRAFTING)
    flying, state = hand_over(a, 6)
    full = a.tables("a")[1][1]
    flying.append(a.world.schedule()[0])
    assert flying[-1].num_scheduled_tokens == {}
    assert [store.blocks for store in stores(flying)] == [((state,), (full,))]


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("shapes", [QWEN_NEXT, GPT_OSS], ids=["states", "windows"])
def test_states_drafts_and_pipeline_stages_together_run_uncached(
    shapes: list[GroupShape], drafts: int, stages: int
) -> None:
    """Any two of them are served."""
    strategy = ParallelStrategy(pp=stages)
    found = configuration.read_setup(
        *make_hybrid_configs({"kvass.chunk_tokens": 64}, shapes, strategy=strategy, drafts=drafts)
    )
    if shapes is QWEN_NEXT and drafts and stages > 1:
        assert isinstance(found, Inert)
        assert "states, pipeline stages and speculative decoding" in found.reason
    else:
        assert isinstance(found, VllmSetup)


def stores(flying: Sequence[Any]) -> list[Any]:
    """What the last step in flight is to store."""
    return list(flying[-1].kv_connector_metadata.stores)
