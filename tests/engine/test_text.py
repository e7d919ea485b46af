"""A hit gives what computing gives, with a pretrained model on real texts: chats, retrieved
documents, a long document, code.

How far vLLM is from itself is measured in the same run: the same prompt, computed without any cache
by an engine with large steps and by one with small steps, and behind a hit in vLLM's own cache. A
hit may be as far.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
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
LONG: Final = 32
"""An answer of which figures are logged."""
WAIT_S: Final = 60.0
SYSTEM: Final = "You answer questions about the texts."
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


def cold(engine: EngineProcess, tokens: list[int], many: int = ANSWER) -> Answer:
    answer = engine.one(tokens, many, skip_prefix_cache=True)
    assert answer.cached == 0
    return answer


def warm(engine: EngineProcess, tokens: list[int], many: int = ANSWER) -> Answer:
    """Its own cache is empty."""
    assert engine.reset()
    return engine.one(tokens, many)


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


@pytest.mark.parametrize("many", [2, pytest.param(10, marks=pytest.mark.slow)])
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
    assert large.reset(), "its own cache has spoiled pages"
    assert spoiled.external
    assert apart(spoiled, right) > 100 * SAME


class Case(NamedTuple):
    """``first`` is stored; ``asked`` begins like it, or is it."""

    first: list[int]
    asked: list[int]


def read(name: str, start: int = 0, size: int = 100_000) -> str:
    return (ROOT / name).read_text()[start : start + size]


def chat_of_ten_turns(engine: EngineProcess, words: Words) -> Case:
    *_, first, asked = turns(engine, words, len(TURNS))
    return Case(first, asked)


def retrieved_documents(_: EngineProcess, words: Words) -> Case:
    passages = [read(f"docs/{name}.md", 1000, 1500) for name in ("faq", "tiers", "laws", "gpu")]
    found = "\n\n".join(passages)
    first, asked = (
        words.tokens(chat(SYSTEM, f"{found}\n\n{question}"))
        for question in ("What is a tier?", "Who tests it?")
    )
    return Case(first, asked)


def long_document(_: EngineProcess, words: Words) -> Case:
    licence = "\n".join(read(name) for name in TEXTS)
    tokens = words.tokens(chat(SYSTEM, f"{licence}\nWhat is a row?"))
    return Case(tokens, tokens)


def code(_: EngineProcess, words: Words) -> Case:
    text = read("src/kvass/blend/plan.py", 0, 7000)
    more = f"{text}\n\n\ndef first(prompt: Prompt) -> int:\n    "
    return Case(words.tokens(text), words.tokens(more))


def near(what: str, one: Answer, other: Answer) -> float:
    """``apart``, which is logged."""
    equal = sum(x == y for x, y in zip(one.tokens, other.tokens, strict=True))
    found = apart(one, other)
    LOG.info("%s: %s of %s tokens, apart by %.1e", what, equal, len(one.tokens), found)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", [chat_of_ten_turns, retrieved_documents, long_document, code])
def test_a_hit_is_as_near_as_vllm_is_to_itself(
    daemon: Daemon,
    large: EngineProcess,
    small: EngineProcess,
    words: Words,
    case: Callable[[EngineProcess, Words], Case],
) -> None:
    """From L1, by engines with both sizes of steps, and from the disk after a kill."""
    first, asked = case(large, words)
    pairs = [(engine, cold(engine, asked, LONG)) for engine in (large, small)]
    LOG.info("%s, a prompt of %s tokens", case.__name__, len(asked))
    large.store(Prompt(first, 1))
    own = large.one(asked, LONG)
    assert own.local
    right = pairs[0][1]
    itself = {"other steps": pairs[1][1], "a hit of its own": own}
    noise = max(SAME, *(near(f"vLLM, {how}", other, right) for how, other in itself.items()))
    certain = all(other.tokens == right.tokens for other in itself.values())
    shared = next((i for i, (x, y) in enumerate(zip(first, asked, strict=False)) if x != y), 0)
    least = (shared or min(len(first), len(asked)) - 1) // 32 * 32

    def check(engine: EngineProcess, right: Answer, many: int) -> None:
        answer = warm(engine, asked, LONG)
        distance = near(f"kvass, {answer.external} loaded", answer, right)
        assert answer.external >= many
        assert distance <= 3 * noise
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
