"""Engines that are killed, and engines of another kind: nothing leaks, nothing is mixed up."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from kvass.testing.daemon import Daemon
from tests.engine.conftest import LORA, NOTHING_OWED, Starter, empty, store
from tests.support.vllm.judge import Judge, check_same
from tests.support.vllm.models import TINY, write_model
from tests.support.vllm.process import ENVIRONMENT, EngineProcess, Prompt
from tests.support.waiting import eventually

pytestmark = pytest.mark.engine

Make = Callable[[int], list[int]]

SMALL: Final = {"max_model_len": 640, "num_gpu_blocks_override": 25}


@pytest.fixture(scope="module")
def small(daemon: Daemon, start: Starter, adapters: Path) -> EngineProcess:
    """An engine with room for 768 tokens, chunks of 64; on a fake GPU."""
    return start(
        "small",
        socket=Path(daemon.socket),
        args=SMALL | LORA,
        options={"kvass.chunk_tokens": 64},
        gpu=True,
    ).wait_ready()


def test_killed_while_it_holds_leases_and_reservations(
    a: EngineProcess, b: EngineProcess, daemon: Daemon, start: Starter, judge: Judge, prompt: Make
) -> None:
    kept, loading, storing = prompt(520), prompt(520), prompt(520)
    store(a, loading)
    victim = start("victim", socket=Path(daemon.socket))
    judge.check(kept, store(victim, kept, 8))
    victim.slow_copies(60.0)  # of a busy machine the load may end before the store begins
    victim.submit(Prompt(loading), Prompt(storing))
    assert eventually(lambda: all(daemon.status()[held] for held in ("leases", "reservations")))
    assert daemon.status()["pins"] > 0
    victim.kill()
    daemon.wait_until(**NOTHING_OWED)
    for tokens in (kept, loading):
        warm = b.one(tokens)
        assert warm.external == 512
        judge.check(tokens, warm)
    cold = b.one(storing)
    assert cold.cached == 0, "what the victim never committed"
    judge.check(storing, cold)
    store(b, storing)  # its key is not blocked


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("running", [False, True])
def test_nothing_waits_for_a_step_that_nobody_makes(
    a: EngineProcess, daemon: Daemon, prompt: Make, asks: bool, running: bool
) -> None:
    """An engine in its user's process that stops with its last answer. It does what is left when
    vLLM asks whether something is unfinished, and before a reset. ``running``: vLLM's
    ``reset_running_requests``, also of a sleep."""
    rows = empty(daemon)["rows"]
    a.leave(Prompt(prompt(900), 1), asks=asks)
    if asks:
        assert empty(daemon)["rows"] == rows + 4, "three chunks and a tail"
    assert a.reset_at_once(running=running), "a block is still held"
    assert empty(daemon)["rows"] == rows + 4


def test_changed_weights_never_hit(
    a: EngineProcess, daemon: Daemon, model: Path, start: Starter, tmp_path: Path, prompt: Make
) -> None:
    """In another engine's files; then in place, while that one runs."""
    tokens = prompt(520)
    first = store(a, tokens, 8)
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    write_model(folder, TINY, seed=1)
    options = {"kvass.fixed_weights": False}  # the default
    after = start("after", folder_of=folder, socket=Path(daemon.socket), options=options)
    second = after.one(tokens)
    assert second.cached == 0
    truth = after.one(tokens, skip_prefix_cache=True)
    assert second.tokens == truth.tokens != first.tokens
    known = [first.tokens, second.tokens]
    for unseen in (True, False):  # as a trainer does
        after.replace_weights(1, unseen=unseen)
        assert after.reset(), "vLLM's own cache alone: the connector is told nothing"
        next_one = after.one(tokens)
        assert next_one.cached == 0
        truth = after.one(tokens, skip_prefix_cache=True)
        assert truth.tokens not in known
        check_same(next_one, truth)  # both cold
        known.append(truth.tokens)
    rows = empty(daemon)["rows"]
    after.leave(Prompt(prompt(900), 1), asks=False)
    assert after.close() == 0
    assert empty(daemon)["rows"] == rows + 4, "what the last step left is stored at the end"


@pytest.mark.slow
def test_a_process_that_saves_a_model_serves_it(own_daemon: Daemon, tmp_path: Path) -> None:
    """And the next one. Of one of which a file is replaced while its engine is made nothing is
    stored."""
    output = run("saved_here", tmp_path, own_daemon.socket, str(tmp_path))
    first, second, replaced = map(int, output.split())
    assert first == 3  # two chunks and a tail
    assert second == 2 * first
    assert replaced == second
    (line,) = re.findall("kvass is off, .*", (tmp_path / "log").read_text())
    assert f"the weight files in {tmp_path}/3 changed since this engine started" in line


def test_an_engine_that_vllm_refuses_with_a_connector_runs_without(tmp_path: Path) -> None:
    """vLLM asserts that an engine of an encoder and a decoder has no connector."""
    (tmp_path / "model").mkdir()
    output = run("whisper", tmp_path, str(tmp_path / "model"), KVASS=str(tmp_path / "socket"))
    assert len(output.split()) == 4, (tmp_path / "log").read_text()


def run(module: str, folder: Path, *args: str, **environment: str) -> str:
    """What ``tests.support.vllm.MODULE`` prints in a fork. Its errors are in ``folder``/log."""
    assert EngineProcess.template is not None
    env = {**os.environ, **ENVIRONMENT, **environment}
    with (folder / "log").open("wb") as log:
        command = [f"tests.support.vllm.{module}", *args]
        status, output = EngineProcess.template.fork(command, env, log.fileno()).ran()
    assert status == 0, (folder / "log").read_text()
    return output


def test_weights_that_are_said_to_be_fixed_must_be(a: EngineProcess, prompt: Make) -> None:
    """The negative control: rows of the old weights give other tokens, so the test above is one."""
    tokens = prompt(520)
    old = store(a, tokens, 8)
    a.replace_weights(1, unseen=True)
    assert a.reset()
    wrong, truth = a.one(tokens), a.one(tokens, skip_prefix_cache=True)
    a.replace_weights(-1, unseen=True)
    assert a.reset(connector=True)
    assert wrong.external == 512
    assert wrong.tokens != truth.tokens != old.tokens
    again = a.one(tokens)
    assert again.cached == 0
    assert again.tokens == old.tokens


def test_preemption_under_a_tiny_budget(
    small: EngineProcess, judge: Judge, daemon: Daemon, prompt: Make
) -> None:
    prompts = [prompt(200) for _ in range(4)]
    loaded = 0
    for _ in range(10):  # computed and stored; then loaded
        small.reset_hooks()
        answers = small.generate(*(Prompt(tokens, 80) for tokens in prompts))
        assert small.hooks().preemptions > 0
        for tokens, answer in zip(prompts, answers, strict=True):
            judge.check(tokens, answer, alike=False)
        assert small.reset(), "a block is still held"
        loaded = sum(answer.external for answer in answers)
        if loaded >= 4 * 128:
            break
    assert loaded >= 4 * 128
    daemon.wait_until(**NOTHING_OWED)


def test_a_lora_adapter_hits_only_itself(
    small: EngineProcess, judge: Judge, adapters: Path, prompt: Make
) -> None:
    tokens = prompt(520)  # after 512 a cold run begins a step, as a hit does: the same sums
    one, other = str(adapters / "one"), str(adapters / "other")
    told = {}
    for lora in (one, other, None):
        cold = store(small, tokens, 8, lora=lora)
        assert cold.cached == 0, f"{lora} found another's rows"
        warm = small.one(tokens, lora=lora)
        assert warm.external == 512
        check_same(warm, cold)
        assert small.reset()
        told[lora] = tuple(cold.tokens)
    assert len(set(told.values())) == 3, "the adapters change nothing, so nothing was proved"
    judge.check(tokens, small.one(tokens))
