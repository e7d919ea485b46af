"""A hit gives what computing gives, with a pretrained model on real texts: chats, retrieved
documents, a long document, code.

How far vLLM is from itself is measured in the same run: the same prompt, computed without any cache
by an engine with large steps and by one with small steps. A hit may be as far.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from examples.demo_questions import TEXTS
from kvass.testing.daemon import Daemon, running_daemon
from tests.engine.conftest import ROOT, Starter
from tests.support import real_model
from tests.support.real_model import Words, chat
from tests.support.vllm.judge import SAME, apart
from tests.support.vllm.process import Answer, EngineProcess, Prompt, Settings
from tests.support.waiting import eventually

pytestmark = pytest.mark.engine

LOG: Final = logging.getLogger(__name__)
ARGS: Final[dict[str, Any]] = {"max_model_len": 6144, "num_gpu_blocks_override": 320}
ANSWER: Final = 8
WAIT_S: Final = 60.0
TURNS: Final = (
    "What is a cache?",
    "Why is it fast?",
    "What happens when it is full?",
    "Name one kind of it.",
    "Is it the same as memory?",
    "Who uses it?",
    "Can it be wrong?",
    "How do I empty it?",
    "What does it cost?",
    "Say it in one word.",
)


@pytest.fixture(scope="module")
def words() -> Words:
    return Words(real_model.needed())


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("text")
    (folder / "disk").mkdir()
    tier = f"disk:{folder}/disk?capacity=1GiB"
    patient: dict[str, Any] = {"lookup_budget_ms": 60_000, "skip_slow_loads": "no"}
    with running_daemon(folder, l1_size="768MiB", tier=[tier], **patient) as one:
        yield one


@pytest.fixture(scope="module")
def large(daemon: Daemon, start: Starter) -> EngineProcess:
    """Computes 2,048 tokens in a step."""
    args = {**ARGS, "max_num_batched_tokens": 2048}
    socket = Path(daemon.socket)
    return start("text-large", folder_of=real_model.needed(), socket=socket, args=args)


@pytest.fixture(scope="module")
def small(daemon: Daemon, start: Starter, large: EngineProcess) -> EngineProcess:
    """Computes 512 tokens in a step."""
    args = {**ARGS, "max_num_batched_tokens": 512}
    socket = Path(daemon.socket)
    return start("text-small", folder_of=real_model.needed(), socket=socket, args=args)


def cold(engine: EngineProcess, tokens: list[int]) -> Answer:
    answer = engine.one(tokens, ANSWER, skip_prefix_cache=True)
    assert answer.cached == 0
    return answer


def warm(engine: EngineProcess, tokens: list[int]) -> Answer:
    """Its own cache is empty."""
    assert engine.reset()
    return engine.one(tokens, ANSWER)


def hits(engine: EngineProcess, tokens: list[int]) -> bool:
    return warm(engine, tokens).external > 0


def wait_flushed(daemon: Daemon) -> None:
    def idle() -> bool:
        (tier,) = daemon.status()["tiers"]
        return not (tier["flush_queue_rows"] or tier["storing_bytes"])

    daemon.wait_until(reservations=0)
    assert eventually(idle, WAIT_S)


def turns(engine: EngineProcess, words: Words, many: int) -> Iterator[list[int]]:
    """The prompts of a chat, each with all that was said before, and stored."""
    said: list[str] = []
    for question in TURNS[:many]:
        tokens = words.tokens(chat("You are a helpful assistant.", *said, question))
        yield tokens
        (answer,) = engine.store(Prompt(tokens, 3 * ANSWER))
        said += [question, words.text(answer.tokens)]


@pytest.mark.parametrize("many", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_each_turn_of_a_chat_loads_those_before_it_and_gives_what_computing_gives(
    large: EngineProcess, words: Words, many: int
) -> None:
    """The control: with spoiled pages it does not."""
    before = 0
    for tokens in turns(large, words, many):
        answer = warm(large, tokens)
        assert answer.external >= before
        right = cold(large, tokens)
        assert answer.tokens == right.tokens
        assert apart(answer, right) <= 10 * SAME
        before = len(tokens) // 32 * 32
    large.disturb(Settings(spoil=True))
    spoiled = warm(large, tokens)
    large.reset_hooks()
    assert spoiled.external
    assert apart(spoiled, right) > 100 * SAME


class Case(NamedTuple):
    """``first`` is stored; ``asked`` begins like it, or is it."""

    first: str
    asked: str


def read(name: str, start: int = 0, size: int = 100_000) -> str:
    return (ROOT / name).read_text()[start : start + size]


def cases() -> dict[str, Case]:
    passages = [read(f"docs/{name}.md", 1000, 1500) for name in ("faq", "tiers", "laws", "gpu")]
    found = "\n\n".join(passages)
    licence = "\n".join(read(name) for name in TEXTS)
    code = read("src/kvass/blend/plan.py", 0, 7000)
    system = "You answer questions about the texts."
    return {
        "retrieved documents": Case(
            chat(system, f"{found}\n\nWhat is a tier?"), chat(system, f"{found}\n\nWho tests it?")
        ),
        "a long document": Case(
            chat(system, f"{licence}\nWhat is a row?"), chat(system, f"{licence}\nWhat is a row?")
        ),
        "code": Case(code, f"{code}\n\n\ndef first(prompt: Prompt) -> int:\n    "),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["retrieved documents", "a long document", "code"])
def test_a_hit_is_as_near_as_vllm_is_to_itself(
    daemon: Daemon, large: EngineProcess, small: EngineProcess, words: Words, name: str
) -> None:
    """From L1, by engines with both sizes of steps, and from the disk after a kill."""
    case = cases()[name]
    first, asked = words.tokens(case.first), words.tokens(case.asked)
    pairs = [(engine, cold(engine, asked)) for engine in (large, small)]
    noise = max(SAME, apart(pairs[0][1], pairs[1][1]))
    certain = pairs[0][1].tokens == pairs[1][1].tokens
    LOG.info("%s: %s tokens, vLLM from itself %.1e, %s", name, len(asked), noise, certain)
    large.store(Prompt(first, 1))
    shared = next((i for i, (x, y) in enumerate(zip(first, asked, strict=False)) if x != y), 0)
    least = (shared or min(len(first), len(asked)) - 1) // 32 * 32

    def check(engine: EngineProcess, right: Answer, many: int) -> None:
        answer = warm(engine, asked)
        LOG.info("%s loaded, from computing %.1e", answer.external, apart(answer, right))
        assert answer.external >= many
        assert apart(answer, right) <= 3 * noise
        assert answer.tokens == right.tokens or not certain

    for engine, right in pairs:
        check(engine, right, least)
    wait_flushed(daemon)
    daemon.restart()
    for engine, right in pairs:
        # Connected again, before it is asked what only the tier has.
        assert eventually(partial(hits, engine, asked[300::-1]), WAIT_S)
        wait_flushed(daemon)
        check(engine, right, least - 256)
    (tier,) = daemon.status()["tiers"]
    assert tier["loaded_rows"] > 0
