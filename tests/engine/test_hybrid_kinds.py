"""Hybrid models that no CPU computes, or that vLLM computes only in part: laid out right, or left
alone; and a hybrid model whose hybrid manager is off.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvass.testing.daemon import Daemon, running_daemon
from tests.engine.conftest import ARGS, BLOCK, ROOT
from tests.engine.hybrid import GPT_OSS, QWEN3_NEXT, Pair, red
from tests.support.vllm import hybrid_models
from tests.support.vllm.models import Blueprint, build
from tests.support.vllm.process import EngineProcess, Settings

pytestmark = pytest.mark.engine


def prompt(tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{seed} {tokens}")
    return [rng.randrange(4, hybrid_models.VOCAB) for _ in range(tokens)]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running_daemon(tmp_path_factory.mktemp("kinds"), "256MiB", lookup_budget_ms=10_000) as one:
        yield one


def start(daemon: Daemon, blueprint: Blueprint, name: str, **options: Any) -> EngineProcess:
    path = build(ROOT / ".cache" / "models", blueprint)
    socket = Path(daemon.socket)
    args = ARGS | options.pop("args", {})
    log = socket.parent / f"{name}.log"
    return EngineProcess(path, log, socket=socket, args=args, patient=True, **options)


# ---------------------------------------------------------------- DeepSeek-V4


@pytest.fixture(scope="module")
def deepseek(daemon: Daemon) -> Iterator[EngineProcess]:
    """Set up by vLLM, every page of it written and verified by the test's own forward pass; on a
    fake GPU."""
    args = {
        "max_model_len": 2048,
        "num_gpu_blocks_override": 1024,
        "dtype": "bfloat16",
        "load_format": "dummy",
        "block_size": 256,
    }
    engine = start(daemon, hybrid_models.deepseek_v4(), "v4", args=args, layout_only=True, gpu=True)
    yield engine.wait_ready()
    engine.kill()


def test_d5_deepseek_v4_has_five_groups_and_pages_of_many_sizes(deepseek: EngineProcess) -> None:
    """Blocks are outermost in it, so each group's layers are one page."""
    groups = deepseek.groups()
    assert [group.block_tokens for group in groups] == [64, 64, 256, 4, 8]
    assert [group.layers for group in groups] == [2, 2, 5, 4, 1]
    sizes = [2 * 37440, 2 * 37440, 2 * 37440 + 2 * 8640 + 1728, 2 * 32832 + 2 * 8640, 32832]
    assert [[page for page, _ in group.pages] for group in groups] == [[size] for size in sizes]


def test_d6_every_page_of_deepseek_v4_comes_back(deepseek: EngineProcess, daemon: Daemon) -> None:
    """Padded and strided: from one block's page to the next's is more than a page."""
    assert any(stride > page for group in deepseek.groups() for page, stride in group.pages)
    for size in (255, 256, 257, 513, 1500):
        tokens = prompt(size)
        assert deepseek.lay_out(f"cold {size}", tokens) == (0, "")
        daemon.wait_until(reservations=0)
        assert deepseek.reset()
        deepseek.scrub()
        assert deepseek.lay_out(f"warm {size}", tokens) == ((size - 1) // 256 * 256, "")
        assert deepseek.reset()


def test_a_zeroed_page_of_any_group_of_deepseek_v4_is_seen(
    deepseek: EngineProcess, daemon: Daemon
) -> None:
    tokens = prompt(1000, seed=1)
    deepseek.lay_out("cold", tokens)
    daemon.wait_until(reservations=0)
    for group in range(5):
        assert deepseek.reset()
        deepseek.disturb(Settings(spoil_group=group))
        found, wrong = deepseek.lay_out(f"zeroed {group}", tokens)
        assert (found, wrong[:7]) == (768, f"group {group}")
    deepseek.disturb(Settings())


# ---------------------------------------------------------------- the hybrid manager off


def test_a_model_with_the_hybrid_manager_off(daemon: Daemon) -> None:
    """One group, all of it stored; what the engine had itself is dropped, so all is loaded."""
    args = {"disable_hybrid_kv_cache_manager": True}
    with start(daemon, GPT_OSS.blueprint, "off", args=args) as engine:
        (group,) = engine.wait_ready().groups()
        assert set(group.specs) == {"FullAttentionSpec"}
        pair = Pair(GPT_OSS, daemon, engine, engine)
        for size in (257, 640, 769):
            tokens = pair.prompt(size)
            pair.store(tokens)
            warm = pair.load(tokens)
            assert (warm.local, warm.external) == (0, (size - 1) // BLOCK * BLOCK)
            pair.check(tokens, warm)
        pair.spoil(0)
        wrong = pair.load(tokens)
        pair.spoil(None)
        assert wrong.external == 768
        red(pair, tokens, wrong)


# ---------------------------------------------------------------- more states


def test_more_states_are_found_if_vllm_retains_more(daemon: Daemon) -> None:
    """A branch hits at the trunk's last state at which a step ended; so does a generated state."""
    args = QWEN3_NEXT.args | {"prefix_cache_retention_interval": QWEN3_NEXT.chunk}
    with start(daemon, QWEN3_NEXT.blueprint, "dense", args=args) as engine:
        pair = Pair(QWEN3_NEXT, daemon, engine.wait_ready(), engine)
        trunk = pair.prompt(600)
        pair.store(trunk + pair.prompt(400))
        second = trunk + pair.prompt(300)
        branch = pair.load(second)
        assert branch.external == 480  # steps compute at most 512 tokens
        pair.check(second, branch)
        question = pair.prompt(700)
        turn = question + pair.store(question, 200).tokens + pair.prompt(50)
        warm = pair.load(turn)
        assert warm.external == 900 // QWEN3_NEXT.chunk * QWEN3_NEXT.chunk
        pair.check(turn, warm)
