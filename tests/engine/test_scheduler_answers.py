"""Whether answers are stored, with vLLM's real schedulers: learned from what prompts repeat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count, islice
from random import Random
from typing import Any

import pytest

from kvass.engine import answers
from kvass.engine.answers import ENDS, LEAST, REMEMBERED, SEARCHED
from tests.support.vllm.fake_client import FakeClient, split
from tests.support.vllm.scheduler import BLOCK, CHUNK, SchedulerHarness, make_configs

ANSWER, SAID = 70, 7
"""How many tokens an answer has, and which one they all are."""


class SmallL1(FakeClient):
    """``FakeClient`` with room for ``room`` rows: the least recently used go."""

    room = 1 << 20

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.used: dict[bytes, None] = {}

    def use(self, rows: Iterable[bytes]) -> None:
        """Use ``rows``, the first chunk last."""
        for row in reversed([*rows]):
            self.used.pop(row, None)
            self.used[row] = None
        self.used = dict.fromkeys([*self.used][-self.room :])
        self.rows = set(self.used)

    def find(self, request: str, hashes: Sequence[bytes], *more: Any) -> Any:
        self.use(row for row in hashes if row in self.used)
        return super().find(request, hashes, *more)

    def commit(self, reservations: Iterable[int]) -> None:
        for reservation in reservations:
            self.use(self.writing.pop(reservation))


class Chats:
    """Chats of one engine. ``keeps``: how many first tokens of an answer the next prompt repeats.
    After them come tokens that nobody has said."""

    def __init__(
        self, keeps: int, option: str = "auto", parser: str = "", tails: bool = True
    ) -> None:
        configs = make_configs(options={"kvass.generated": option})
        configs[0].structured_outputs_config.reasoning_parser = parser
        self.client = SmallL1(tails=tails)
        self.world = SchedulerHarness(self.client, configs=configs)
        self.keeps, self.answer = keeps, ANSWER
        self._fresh, self._names = count(1000), count()

    def fresh(self, tokens: int) -> list[int]:
        return [*islice(self._fresh, tokens)]

    def ask(self, prompt: Sequence[int]) -> int:
        """How many tokens of a prompt and its answer are offered to be stored."""
        self.client.reserves.clear()
        name = f"r{next(self._names)}"
        self.world.add(name, prompt, max_tokens=self.answer)
        self.world.run(self.client)
        items = [item for items in self.client.reserves for item in items]
        blocks = [item.first * CHUNK + len(item.blocks) // 32 * BLOCK for item in items]
        return max([*blocks, *(len(split(item.digests, 32)) * CHUNK for item in items)], default=0)

    def after(self, prompt: Sequence[int]) -> list[int]:
        """The next prompt of a chat."""
        said = [SAID] * self.keeps + self.fresh(self.answer - self.keeps)
        return [*prompt, *said, *self.fresh(20)]

    def turns(self, number: int) -> bool:
        """Whether the answer to the last of ``number`` prompts of a new chat is stored."""
        prompt = self.fresh(100)
        for _ in range(number - 1):
            self.ask(prompt)
            prompt = self.after(prompt)
        return self.ask(prompt) > len(prompt)

    @property
    def share(self) -> tuple[int, int]:
        """Of answers that were gone on from: how many tokens of them the prompts repeated."""
        results = self.client.results
        return sum(r.repeated_tokens for r in results), sum(r.answer_tokens for r in results)


@pytest.mark.parametrize("tails", [True, False])
@pytest.mark.parametrize("parser", ["", "qwen3"])
@pytest.mark.parametrize("keeps", [ANSWER, 0])
def test_answers_are_stored_where_the_next_prompt_repeats_them(
    keeps: int, parser: str, tails: bool
) -> None:
    chats = Chats(keeps, "auto", parser, tails)
    assert chats.turns(LEAST) is not bool(parser), "too little is known"
    chats.turns(2)
    assert chats.turns(1) is (keeps > 0)


@pytest.mark.parametrize(("option", "stored"), [("on", True), ("off", False)])
def test_what_is_set_is_not_learned_but_told(option: str, stored: bool) -> None:
    chats = Chats(0 if stored else ANSWER, option)
    assert chats.turns(LEAST + 2) is stored
    repeated, tokens = chats.share
    assert tokens > 0
    assert (repeated > 0) is not stored


@pytest.mark.parametrize(("keeps", "stored"), [(32, False), (48, True)])
def test_the_share_is_of_tokens(keeps: int, stored: bool) -> None:
    """100 tokens of prompt, 70 of answer: hits of it end at tokens 112, 128, 144 and 160."""
    chats = Chats(keeps)
    chats.turns(2)
    assert chats.share == ((100 + keeps) // BLOCK * BLOCK - 100, 60)
    for _ in range(LEAST):
        chats.turns(2)
    assert chats.turns(1) is stored


def test_what_clients_do_now_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "TURNS", 2 * LEAST)
    chats = Chats(ANSWER)
    chats.turns(2 * LEAST)
    chats.keeps = 0
    for _ in range(LEAST + 1):
        chats.turns(2)
    assert not chats.turns(1)
    chats.keeps = ANSWER
    for _ in range(LEAST + 1):
        chats.turns(2)
    assert chats.turns(1), "it is learned though nothing was stored"


def test_each_answer_counts_once_and_none_that_a_prompt_is_too_short_to_repeat() -> None:
    chats = Chats(0)
    prompt = chats.fresh(96)
    chats.ask(prompt)
    for _ in range(2):
        chats.ask([*prompt, *chats.fresh(20)])
    assert chats.share == (0, 64)
    chats.ask([*prompt, *chats.fresh(15)])
    assert chats.share == (0, 64), "a hit of an answer would end behind it"
    chats.ask([*chats.fresh(96), *[SAID] * 20])
    assert chats.share == (0, 64), "it is no chat that goes on"


def test_prompts_of_which_only_the_end_differs_are_told_apart() -> None:
    """All chats begin with the same whole blocks. One that goes on does so from its own beginning,
    also if another one has ended since."""
    chats = Chats(ANSWER)
    beginning = chats.fresh(100)
    prompts = [[*beginning, *chats.fresh(8)] for _ in range(2 * LEAST)]
    for one, other in zip(prompts[::2], prompts[1::2], strict=True):
        chats.ask(one)
        chats.ask(other)
        chats.ask(chats.after(one))
        assert chats.share == (0, 0)
    assert chats.ask(chats.fresh(100)) > 100
    for one in prompts[:LEAST]:
        chats.ask(one)
        chats.ask(chats.after(one))
    assert chats.share == (68 * LEAST, 68 * LEAST)


@pytest.mark.parametrize("keeps", [ANSWER, 0])
def test_hits_are_those_of_the_better_setting(keeps: int) -> None:
    """Chats that come in any order, in an L1 that lacks room for all of them."""

    def hits(option: str, parser: str = "") -> int:
        chats, random = Chats(keeps, option, parser, tails=False), Random(1)
        chats.answer, chats.client.room = 38, 48
        chats.keeps = min(keeps, chats.answer)
        prompts = [chats.fresh(100) for _ in range(5)]
        for _ in range(45):
            i = random.randrange(len(prompts))
            chats.ask(prompts[i])
            chats.world.scheduler.reset_prefix_cache()
            last = len(prompts[i]) > 300
            prompts[i] = chats.fresh(100) if last else chats.after(prompts[i])
        return sum(result.hit_tokens for result in chats.client.results[15:])  # it has learned

    found = {name: hits(*name) for name in [("on",), ("off",), ("auto",), ("auto", "qwen3")]}
    better, worse = (("on",), ("off",)) if keeps else (("off",), ("on",))
    assert found[worse] < 0.9 * found[better]
    assert min(found["auto",], found["auto", "qwen3"]) >= 0.98 * found[better]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in (("REMEMBERED", 3), ("SEARCHED", 4)):
        monkeypatch.setattr(answers, name, number)
    chats = Chats(ANSWER)
    prompts = [chats.fresh(100) for _ in range(4)]
    for prompt in prompts:
        chats.ask(prompt)
    left = chats.world.planner._answers._left
    assert len(left) == 3 < REMEMBERED
    assert all(len(one.hashes) <= ENDS for one in left.values())
    chats.ask(chats.after(prompts[0]))
    assert chats.share == (0, 0), "the oldest is forgotten"
    chats.ask([*chats.after(prompts[3]), *chats.fresh(16 * 4)])
    assert chats.share == (0, 0), "it went on too long ago"
    chats.ask([*chats.after(prompts[3])[:120], *chats.fresh(16)])
    assert chats.share == (12, 60)
    assert SEARCHED > 4
