"""Real engines over two nodes, each with a daemon: pipeline stages, another connector beside ours,
tiers, a drafter, weights that change, and few blocks with aborts. See ``test_nodes.py``."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest

from kvass.testing.daemon import Daemon, running_daemon
from tests.engine.conftest import ARGS, BLOCK, NOTHING_OWED
from tests.engine.test_beside_another import OFFLOADING, both
from tests.engine.test_eagle import eagle
from tests.engine.test_nodes import (
    CHUNK,
    LARGE,
    OPTIONS,
    PATIENT,
    check,
    drawn,
    hit_of,
    wait_for_hits,
)
from tests.support.vllm.judge import Judge, apart
from tests.support.vllm.models import TINY
from tests.support.vllm.nodes import NodesEngine, running_daemons
from tests.support.vllm.process import Prompt, Settings
from tests.support.waiting import eventually

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TOKENS: Final = 4
ANSWER: Final = 30
"""Tokens of answers that requests take blocks from each other for."""
KVASS: Final[dict[str, Any]] = {
    "kv_connector": "KvassConnector",
    "kv_connector_module_path": "kvass.connectors.vllm",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"kvass.fixed_weights": True, **OPTIONS},
}
FEW_BLOCKS: Final[dict[str, Any]] = {
    "max_model_len": 1024,
    "num_gpu_blocks_override": 36,
    "max_num_batched_tokens": 256,
}


@contextmanager
def engine_of(
    model: Path, folder: Path, daemons: list[Daemon], **fields: Any
) -> Iterator[NodesEngine]:
    """One engine over ``daemons`` that finds what it stored."""
    sockets = [Path(daemon.socket) for daemon in daemons]
    fields = {"options": OPTIONS, "patient": True, **fields}
    engine = NodesEngine(model, folder / "engine.log", sockets, **fields)
    with engine.wait_ready():
        wait_for_hits(engine)
        yield engine


def at_rest(daemons: list[Daemon]) -> None:
    for daemon in daemons:
        daemon.wait_until(**NOTHING_OWED)


def check_hits(engine: NodesEngine, judge: Judge, asked: list[list[int]]) -> None:
    """Assert that prompts are found again whole, and answered right."""
    engine.store(*(Prompt(tokens, TOKENS) for tokens in asked))
    for tokens in asked:
        assert engine.reset()
        warm = engine.one(tokens, TOKENS)
        assert (warm.local, warm.external) == (0, hit_of(tokens))
        check(judge, tokens, warm)


def test_a_pipeline_stage_on_each_node(model: Path, tmp_path: Path, judge: Judge) -> None:
    """The second node has one layer, the first all others."""
    stages = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}
    split = {"VLLM_PP_LAYER_PARTITION": f"{TINY.layers - 1},1"}
    with (
        running_daemons(tmp_path, LARGE, **PATIENT) as daemons,
        engine_of(model, tmp_path, daemons, args={**ARGS, **stages}, variables=split) as engine,
    ):
        check_hits(engine, judge, drawn(8, 8))
        at_rest(daemons)
        tokens = drawn(9, 1)[0] + [7] * CHUNK
        engine.store(Prompt(tokens, 1))
        for rank in (0, 1):  # the negative control
            assert engine.reset()
            engine.disturb(Settings(spoil=True), rank=rank)
            wrong = engine.one(tokens)
            engine.disturb(Settings(), rank=rank)
            assert wrong.external == hit_of(tokens)
            assert apart(wrong, judge.cold(tokens)) > judge.noise()


def test_beside_another_connector(model: Path, tmp_path: Path, judge: Judge) -> None:
    """Behind the other one, kvass serves a new engine: only kvass outlives an engine."""
    asked = drawn(8, 8)
    with running_daemons(tmp_path, LARGE, **PATIENT) as daemons:
        transfer = both(KVASS, OFFLOADING)
        with engine_of(model, tmp_path, daemons, args=ARGS, transfer=transfer) as engine:
            check_hits(engine, judge, asked)
        transfer = both(OFFLOADING, KVASS)
        with engine_of(model, tmp_path, daemons, args=ARGS, transfer=transfer) as engine:
            for tokens in asked:
                warm = engine.one(tokens, TOKENS)
                assert warm.cached >= hit_of(tokens), "offloading may have a block more"
                check(judge, tokens, warm)
        at_rest(daemons)


def test_what_daemons_evicted_comes_from_the_tiers_of_both(
    model: Path, tmp_path: Path, judge: Judge
) -> None:
    asked = drawn(3, 12)
    with ExitStack() as ending:
        daemons = []
        for node in range(2):
            (tier := tmp_path / str(node) / "tier").mkdir(parents=True)
            url = f"disk:{tier}?capacity=64MiB"
            one = running_daemon(tier.parent, "3MiB", tier=[url], **PATIENT)
            daemons.append(ending.enter_context(one))
        engine = ending.enter_context(engine_of(model, tmp_path, daemons, args=ARGS))
        for tokens in asked:
            engine.store(Prompt(tokens, 1))
            assert engine.reset()
            for daemon in daemons:
                assert eventually(partial(_flushed, daemon), 30)
        for tokens in asked:
            assert engine.reset()
            warm = engine.one(tokens, TOKENS)
            assert hit_of(tokens) - warm.external < CHUNK, "tails alone are in no tier"
            check(judge, tokens, warm)
        assert all(daemon.status()["tiers"][0]["loaded_rows"] > 20 for daemon in daemons)
        at_rest(daemons)


def _flushed(daemon: Daemon) -> bool:
    (tier,) = daemon.status()["tiers"]
    return not tier["flush_queue_rows"] and not tier["storing_bytes"]


def test_a_drafter_and_weights_that_change_in_place(model: Path, tmp_path: Path) -> None:
    """The drafter reads a block more than a hit has. New weights hide the rows of all nodes."""
    with (
        running_daemons(tmp_path, LARGE, **PATIENT) as daemons,
        engine_of(model, tmp_path, daemons, args={**ARGS, **eagle()}) as engine,
    ):
        judge = Judge(engine, beyond=BLOCK)
        judge.noise()  # of the first weights
        for tokens in drawn(5, 4, most=400):
            tokens += [7] * 3 * CHUNK
            engine.store(Prompt(tokens, 1))
            assert engine.reset()
            warm = engine.one(tokens)
            assert warm.external == (len(tokens) // CHUNK - 1) * CHUNK
            check(judge, tokens, warm)
            engine.replace_weights(by=1)
            assert engine.reset()
            assert engine.one(tokens, salt="new").external == 0
            assert engine.one(tokens).external == 0
        at_rest(daemons)


@contextmanager
def stalling(daemon: Daemon) -> Iterator[None]:
    """A daemon that stands still for some ms again and again, so that answers are late."""
    over = threading.Event()

    def stall() -> None:
        rng = Random(1)
        while not over.wait(rng.uniform(0.02, 0.1)):
            daemon.suspend()
            over.wait(rng.uniform(0.005, 0.05))
            daemon.resume()

    thread = threading.Thread(target=stall)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_preemptions_and_aborts_while_lookups_are_under_way(
    model: Path, tmp_path: Path, judge: Judge
) -> None:
    rng, hits, ended = Random(4), 0, {"length": 0, "abort": 0}
    with (
        running_daemons(tmp_path, LARGE) as daemons,
        engine_of(model, tmp_path, daemons, args=FEW_BLOCKS, patient=False) as engine,
    ):
        asked = drawn(5, 12, most=400)
        engine.reset_hooks()
        with stalling(daemons[1]):
            for _ in range(12):
                prompts = [
                    Prompt(
                        tokens,
                        ANSWER,
                        at_s=rng.uniform(0, 0.2),
                        aborts=rng.choice([0, 0, rng.randint(1, 20)]),
                    )
                    for tokens in rng.sample(asked, 8)
                ]
                prompts.sort(key=lambda prompt: prompt.at_s)
                for prompt, answer in zip(prompts, engine.generate(*prompts), strict=True):
                    ended[answer.finish_reason or ""] += 1
                    if answer.finish_reason == "length":
                        check(judge, prompt.tokens, answer)
                        hits += answer.external > 0
                assert engine.reset(), "no block is held"
        counted = engine.hooks()
        at_rest(daemons)
        assert min(*ended.values(), hits, counted.preemptions, counted.told_none) > 0
        wait_for_hits(engine)
