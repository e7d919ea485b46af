"""Blend in a real vLLM engine: documents that were computed alone, and stand elsewhere in a prompt.

The oracle is the same engine without blend, with a salt that shares nothing.
"""

from __future__ import annotations

import math
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from kvass.testing.daemon import Daemon, running_daemon
from tests.engine.conftest import BLOCK, Starter
from tests.support.vllm.instruments import BlendControls
from tests.support.vllm.judge import Judge, apart
from tests.support.vllm.models import TINY
from tests.support.vllm.process import Answer, EngineProcess, Prompt, Settings

pytestmark = pytest.mark.engine

Same = Callable[[Answer, Answer], bool]
SIZE: Final = 64
"""Tokens of a chunk."""
BLENDS: Final[dict[str, Any]] = {
    "scheduler_cls": "kvass.connectors.vllm.blend.BlendScheduler",
    "async_scheduling": False,
}


def text(tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(4, TINY.vocab) for _ in range(tokens)]


DOCUMENTS: Final = [text(200, 1), text(140, 2), text(256, 3)]
FIRST, SECOND, THIRD = DOCUMENTS


def rag(seed: int) -> list[int]:
    """A prompt of them that no other test has. One document stands in it twice. Of two the end is
    no whole chunk. None begins at a block."""
    return [*text(77, seed), *THIRD, *text(5, 5), *FIRST, *THIRD, *SECOND, *text(30, 6)]


FOUND: Final = (4 + 3 + 4 + 2) * SIZE


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("blend")
    with running_daemon(folder, l1_size="128MiB", lookup_budget_ms=10_000) as one:
        yield one


@pytest.fixture(scope="module")
def started(daemon: Daemon, start: Starter) -> EngineProcess:
    options = {"kvass.chunk_tokens": SIZE, "kvass.blend": "first_k:16"}
    return start("blend", socket=Path(daemon.socket), args=BLENDS, options=options)


@pytest.fixture
def engine(started: EngineProcess, daemon: Daemon) -> Iterator[EngineProcess]:
    """Its documents are stored, its own cache is empty, and it computes nothing again."""
    started.blend(control="off")
    for document in DOCUMENTS:
        started.one(document, 1)
    assert started.reset()
    started.blend("none")
    yield started
    started.disturb(Settings())
    daemon.wait_until(leases=0, reservations=0, pins=0)


def cold(engine: EngineProcess, tokens: list[int]) -> Answer:
    """What a full prefill says."""
    answer = engine.one(tokens, 4, salt=f"cold {random.random()}")
    assert answer.cached == 0
    engine.blend("none")
    return answer


@pytest.fixture(scope="module")
def same(started: EngineProcess) -> Same:
    """Whether two answers are as near as vLLM is to itself: blend computes in other steps."""
    started.blend(control="off")
    noise = Judge(started).noise()
    return lambda one, other: apart(one, other) <= noise


def ask(
    engine: EngineProcess, tokens: list[int], select: str, control: str = ""
) -> tuple[Answer, dict[str, int]]:
    """The answer, and what was counted meanwhile; nothing stays in the engine's own cache."""
    assert engine.reset()
    engine.blend(select, control)
    answer = engine.one(tokens, 4)
    assert engine.reset()
    return answer, engine.blend("none")


def test_shuffled_documents_are_not_computed(engine: EngineProcess, same: Same) -> None:
    prompt = rag(100)
    right = cold(engine, prompt)
    for select, prefix, again in (
        ("none", 0, 0),
        ("none", SIZE, 0),  # what stands before the first segment was stored
        ("first_k:16", SIZE, 4 * 16),
        ("all", SIZE, FOUND),
    ):
        answer, counts = ask(engine, prompt, select)
        spared = prefix + FOUND - again
        assert counts["computed"] == len(prompt) - spared + 3, "three tokens are generated"
        assert (answer.local, answer.external) == (0, spared)
        assert (counts["blends"], counts.get("blended_tokens")) == (1, FOUND - again)
        assert same(answer, right) == (select == "all")


def test_exact_kv_at_its_own_place_gives_what_a_full_prefill_gives(
    engine: EngineProcess, same: Same
) -> None:
    tokens = FIRST[: 3 * SIZE] + text(40, 10)
    right = cold(engine, tokens)
    for select, again in (("none", 0), ("0-20,70-75,100-130", 55), ("64-128", 64)):
        answer, counts = ask(engine, tokens, select, "no prefix")
        assert counts["computed"] == 40 + again + 3
        assert same(answer, right)


def test_the_oracle_says_what_blend_says(engine: EngineProcess, same: Same) -> None:
    prompt = rag(103)
    right = cold(engine, prompt)
    for select in ("none", "first_k:16", "0-20,100-330,400-430"):
        blended, _ = ask(engine, prompt, select)
        answer, counts = ask(engine, prompt, select, "oracle")
        assert same(answer, blended)
        assert not same(answer, right)
        assert counts["computed"] == len(prompt) - SIZE + 3, "but for the exact prefix"
        assert not same(ask(engine, prompt, select, "oracle, not moved")[0], blended)
    for select, control in (("all", ""), ("none", ", not replaced")):
        assert same(ask(engine, prompt, select, "oracle" + control)[0], right)


def test_the_oracle_says_what_blend_would_say_with_kv_dev(
    engine: EngineProcess, same: Same
) -> None:
    prompt = [*text(20, 104), *SECOND, *text(5, 5), *FIRST, *text(30, 6)]  # one step computes it
    answer, _ = ask(engine, prompt, "kv_dev:0.1", "oracle")
    chosen = engine.call("chosen")
    assert len(chosen) == math.ceil(0.1 * 5 * SIZE)
    blended, _ = ask(engine, prompt, ",".join(f"{at}-{at + 1}" for at in chosen))
    assert same(answer, blended)
    assert not same(answer, ask(engine, prompt, "none")[0])
    answer, counts = ask(engine, rag(104), "kv_dev:0.1", "oracle")
    assert counts["blends_failed"] == 1
    assert same(answer, cold(engine, rag(104)))


def test_k_is_moved_to_where_vllm_would_have_put_it(engine: EngineProcess, same: Same) -> None:
    for control in ("", "not moved"):
        ask(engine, rag(101), "all", control)  # what was placed is computed over it
        k, v = engine.call("first_layer_error")
        assert v < 1e-4
        assert (k < 1e-4) == (not control)
    moved, left = (ask(engine, rag(101), "none", control)[0] for control in ("", "not moved"))
    assert not same(moved, left)


@pytest.mark.parametrize("local", [True, False])
def test_a_later_prompt_gets_no_blended_kv(engine: EngineProcess, same: Same, local: bool) -> None:
    for control in ("", "no salt"):
        prompt = rag(102 + len(control) + local)
        right = cold(engine, prompt)
        engine.blend("none", control)
        assert not same(engine.one(prompt, 4), right)
        engine.blend("none", "off")
        assert local or engine.reset()
        later = engine.one(prompt, 4)
        hit = (len(prompt) - 1) // BLOCK * BLOCK if control else 2 * BLOCK
        assert (later.local, later.external) == ((hit, 0) if local else (0, hit))
        assert same(later, right) == (not control)
    assert engine.reset(connector=True)  # what the control stored and indexed


def test_prompts_blend_side_by_side(engine: EngineProcess, same: Same) -> None:
    prompts = [[*text(50 + i, 20 + i), *SECOND, *text(i, 30 + i), *FIRST, 7] for i in range(4)]
    prompts.append(text(300, 40))
    alone = [ask(engine, one, "first_k:16")[0] for one in prompts]
    engine.blend("first_k:16")
    together = engine.generate(*[Prompt(one, 4) for one in prompts])
    assert all(same(a, b) for a, b in zip(alone, together, strict=True))
    assert engine.blend()["blends"] == 4


@pytest.mark.parametrize("control", ["", "not placed"])
def test_a_load_that_fails_costs_a_full_prefill(
    engine: EngineProcess, same: Same, control: str
) -> None:
    prompt = rag(120 + len(control))
    right = cold(engine, prompt)
    engine.disturb(Settings(ahead_s=0 if control else 1e6))  # else its lease lapsed
    answer, counts = ask(engine, prompt, "none", control)
    assert same(answer, right)
    assert counts["computed"] == len(prompt) + 3
    assert counts["blends_failed"] == 1


def test_a_defect_of_the_planner_costs_a_full_prefill(engine: EngineProcess, same: Same) -> None:
    prompt = rag(130)
    right = cold(engine, prompt)
    for asked in BlendControls.ASKED:
        assert same(ask(engine, prompt, "none", asked)[0], right)
    answer, counts = ask(engine, prompt, "none")
    assert counts["blends"] == 1
    assert not same(answer, right)


def test_salts_do_not_find_each_others_documents(engine: EngineProcess) -> None:
    engine.blend()
    answer = engine.one(rag(140), 4, salt="other")
    assert (answer.cached, engine.blend()["computed"]) == (0, len(rag(140)) + 3)
    assert ask(engine, rag(140), "none")[0].external == FOUND


def test_a_daemon_that_dies_between_search_and_load_costs_no_answer(
    engine: EngineProcess, same: Same, daemon: Daemon
) -> None:
    prompt = rag(141)
    right, blended = cold(engine, prompt), ask(engine, prompt, "none")[0]
    engine.blend("none")
    engine.arm("update_state_after_alloc", "before", [(daemon.pid, signal.SIGKILL, 0.0)])
    answer = engine.one(prompt, 4)
    counts = engine.blend()
    daemon.kill()
    assert same(answer, right if counts.get("blends_failed") else blended)
    daemon.start()
