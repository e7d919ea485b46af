"""What vLLM itself says, with which the answers of a hit are compared.

What was computed in the same steps is the same on every machine, to ``SAME``: cold runs of a prompt
in two processes, or a hit of kvass and vLLM's own local hit. A hit and a cold run are not: kernels
add in another order when a step has another size, by how much depends on the CPU (one with AMX: up
to 0.03 in a log-probability), and a greedy tie may fall the other way. So a hit is compared with a
local hit; and where nothing was computed in the same steps, ``Judge.noise`` is how far vLLM is from
itself in this run.
"""

from __future__ import annotations

from itertools import count, cycle, islice
from random import Random
from typing import Final

from tests.support.vllm.process import Answer, EngineProcess, Prompt

SAME: Final = 1e-4
SIZES: Final = (300, 500, 700, 1000)
"""Of the prompts with which noise is measured."""


class Wrong(AssertionError):
    """An answer is not what vLLM gives without kvass."""


def apart(one: Answer, other: Answer) -> float:
    """The largest difference of log-probabilities, up to the first token that differs: what follows
    is another text."""
    worst = 0.0
    for token, twin, x, y in zip(
        one.tokens, other.tokens, one.logprobs, other.logprobs, strict=True
    ):
        worst = max(worst, abs(x - y))
        if token != twin:
            break
    return worst


def check_same(answer: Answer, right: Answer) -> None:
    """:raises Wrong: unless ``answer`` is what was computed in the steps of ``right``."""
    assert answer.finish_reason == "length"
    if answer.tokens != right.tokens or not apart(answer, right) <= SAME:
        raise Wrong(f"{answer} differs from {right} by {apart(answer, right)}")


class Judge:
    """``engine`` under salts that nobody else uses: so it hits only what itself computed under
    them, with or without kvass. ``beyond``: how many more tokens must be cached for a hit of vLLM.
    """

    def __init__(self, engine: EngineProcess, beyond: int = 0) -> None:
        self.engine, self._beyond = engine, beyond
        self._salts = count()
        self._cold: dict[tuple[tuple[int, ...], int], Answer] = {}
        self._noise = 0.0

    def cold(self, tokens: list[int], max_tokens: int = 8) -> Answer:
        """Computed from the first token on."""
        key = (tuple(tokens), max_tokens)
        if key not in self._cold:
            self._cold[key] = self.engine.one(tokens, max_tokens, salt=self._salt())
            assert self._cold[key].cached == 0
        return self._cold[key]

    def after_local_hit(
        self, tokens: list[int], hit: int, max_tokens: int = 8, stored: int | None = None
    ) -> Answer:
        """Computed after ``hit`` tokens that vLLM found in its own cache.

        ``stored``: how many tokens had the prompt that computed these (by default as many as this
        one), so that they are computed in steps of the same size.
        """
        salt = self._salt()
        begin, rest = tokens[: hit + self._beyond], tokens[hit + self._beyond :]
        more = (len(tokens) if stored is None else stored) - len(begin)
        others = islice(cycle([token ^ 1 for token in rest]), max(0, more))
        self.engine.one([*begin, *others], 1, salt=salt)
        answer = self.engine.one(tokens, max_tokens, salt=salt)
        assert (answer.local, answer.external) == (hit, 0)
        return answer

    def right(self, tokens: list[int], answer: Answer, stored: int | None = None) -> Answer:
        """What vLLM says where as much of ``tokens`` is cached as was of ``answer``."""
        many = len(answer.tokens)
        if not answer.cached:
            return self.cold(tokens, many)
        return self.after_local_hit(tokens, answer.cached, many, stored)

    def check(
        self, tokens: list[int], answer: Answer, *, alike: bool = True, stored: int | None = None
    ) -> None:
        """:raises Wrong: unless ``answer`` is right, whatever of its prompt was cached.

        ``alike``: it was computed alone, and what it loaded was computed in the steps of a prompt
        of ``stored`` tokens. Else it is as near as vLLM is to itself.
        """
        right = self.right(tokens, answer, stored)
        if alike:
            check_same(answer, right)
        elif answer.finish_reason != "length" or not apart(answer, right) <= self.noise():
            raise Wrong(f"{answer} differs from {right} by more than {self.noise()}")

    def check_wrong(self, tokens: list[int], answer: Answer, stored: int | None = None) -> None:
        """Assert that ``answer`` differs from what is right by more than vLLM from itself."""
        assert apart(answer, self.right(tokens, answer, stored)) > self.noise()

    def noise(self) -> float:
        """By how much vLLM's answers to a prompt can differ with the steps in which it is computed:
        three times what is measured between cold runs, local hits and runs in company."""
        if not self._noise:
            rng, most = Random(0), SAME
            for size in SIZES:
                tokens, company = (rng.choices(range(4, 1000), k=n) for n in (size, 200))
                both = [Prompt(one, 8, salt=self._salt()) for one in (company, tokens)]
                _, crowded = self.engine.generate(*both)
                salt = self._salt()
                cold, again = (self.engine.one(tokens, 8, salt=salt) for _ in range(2))
                most = max(most, apart(crowded, cold), apart(again, cold))
            self._noise = 3 * most
            assert self._noise < 0.5, "too much noise to prove anything"
        return self._noise

    def _salt(self) -> str:
        return f"judge {next(self._salts)}"
