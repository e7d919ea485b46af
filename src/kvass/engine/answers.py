"""Whether answers are stored: learned from how much of them later prompts repeat.

A request that ended leaves hashes: of the last whole block of its prompt, of the tokens of its
prompt behind it, and of some ends at which a hit of its answer could end. A later prompt that has
the first two, and goes on to the first of the ends, *goes on* from that request. Hashes of blocks
are chained, so the last end that it has is how much of the answer it repeats. This is seen whether
the answer was stored or not, and also where the engine's own cache has all of it.

Laws of this file:

- What is stored of a request is decided once, when it begins.
- An ended request counts once: for the first prompt that goes on from it.
- The hashes of ``REMEMBERED`` requests are kept, ``ENDS`` + 2 of each, and a prompt is compared
  with them at its last ``SEARCHED`` blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvass.engine.observers import Observer
from kvass.engine.protocols import Request
from kvass.engine.request_state import RequestState
from kvass.engine.setup import EngineSetup

REMEMBERED: Final = 4096
"""Of how many ended requests hashes are kept: 4 MB."""
ENDS: Final = 8
"""At how many ends of an answer a later prompt is compared with it."""
SEARCHED: Final = 2048
"""At how many of its last blocks a prompt may go on from an earlier request: 0.2 ms."""
TURNS: Final = 64
"""How many of the last prompts that went on count."""
LEAST: Final = 4
"""How many there must be before they decide."""
WORTH: Final = 0.5
"""The share of their tokens that must be repeated for answers to be worth their room. Where L1 has
10 to 20 % of what the prompts take, storing them then costs as many hits as it brings (059)."""


class LeftAnswer(NamedTuple):
    """What a request left that ended. ``prompt``: the tokens of its prompt. ``rest``: a hash of
    those behind its last whole block, which many prompts may share. ``ends``: where hits of its
    answer could end, in tokens, the last one first. ``hashes``: those of the blocks there."""

    prompt: int
    rest: int
    ends: range
    hashes: list[bytes]


class Answers(Observer):
    """What one engine has learned of answers. Used from its scheduler's thread only."""

    def __init__(self, setup: EngineSetup) -> None:
        self._setting, self._thinks = setup.answers, setup.thinks
        self._block = setup.hash_tokens
        self._step = setup.hash_tokens if setup.chunk_blocks else setup.chunk_tokens
        """A hit ends at a multiple of so many tokens."""
        self._left: dict[bytes, LeftAnswer] = {}
        """By the hash of the last whole block of the request's prompt; the oldest is first."""
        self._turns: deque[tuple[int, int]] = deque(maxlen=TURNS)
        """Of the last prompts that went on: the tokens of the answer, and those repeated."""

    @property
    def worth_storing(self) -> bool:
        """Whether the answer of a request that begins now is stored. Until enough is known it is,
        unless answers begin with thinking."""
        if self._setting is not None:
            return self._setting
        if len(self._turns) < LEAST:
            return not self._thinks
        tokens = sum(tokens for tokens, _ in self._turns)
        return sum(repeated for _, repeated in self._turns) >= WORTH * tokens

    def begin(self, state: RequestState) -> None:
        """A request begins: compare its prompt with what earlier requests left, and decide."""
        request = state.request
        count = request.hashed_blocks if self._block else 0
        first = max(0, count - SEARCHED)
        hashes = request.block_hashes(first, count)
        for digest in reversed(hashes):
            left = self._left.get(digest)
            if left is not None and left.rest == self._rest(request, left.prompt):
                if left.ends[-1] <= count * self._block:  # else it is too short to say
                    del self._left[digest]
                    self._goes_on(state, left, hashes, first)
                break
        state.stores_answer = self.worth_storing

    def _rest(self, request: Request, prompt: int) -> int:
        """``LeftAnswer.rest`` of a prompt that ends at token ``prompt`` of ``request``."""
        return hash(tuple(request.token_ids(prompt // self._block * self._block, prompt)))

    def _goes_on(
        self, state: RequestState, left: LeftAnswer, hashes: Sequence[bytes], first: int
    ) -> None:
        """The prompt of a request goes on from an earlier one. ``hashes``: those of its blocks from
        block ``first`` on."""
        repeated = 0
        for end, digest in zip(left.ends, left.hashes, strict=True):
            number = end // self._block - 1 - first
            if number < len(hashes) and hashes[number] == digest:
                repeated = end - left.prompt
                break
        state.turn = left.ends[0] - left.prompt, repeated
        self._turns.append(state.turn)

    def ended(self, state: RequestState) -> None:
        request, block, step = state.request, self._block, self._step
        if not block or (prompt := request.prompt_tokens) < block:
            return
        known = min(request.hashed_blocks * block, request.known_tokens - 1)  # the last has no KV
        before, last = prompt // step, known // step
        if last <= before:
            return
        steps = range(last, before, -max(1, -(-(last - before) // ENDS)))
        ends = range(steps.start * step, steps.stop * step, steps.step * step)
        numbers = (prompt // block, *(end // block for end in ends))
        key, *hashes = (request.block_hashes(n - 1, n)[0] for n in numbers)
        self._left.pop(key, None)  # the newest is last
        self._left[key] = LeftAnswer(prompt, self._rest(request, prompt), ends, hashes)
        if len(self._left) > REMEMBERED:
            del self._left[next(iter(self._left))]
