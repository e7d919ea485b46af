"""What a simulated engine does with segments: it indexes prompts, searches others, and checks every
answer against the text that the keys stand for.

It has chance of its own. Chunks of different prompts have the same text, and some keys are of two
models that share a namespace, so what is found is right if any prompt says so.
"""

from __future__ import annotations

import random
from hashlib import blake2b
from itertools import pairwise

from kvass import messages as m
from tests.support.simulation.random_models import CHUNK_TOKENS, WIDTH, Model
from tests.support.witness.records import BrokenLawError

_SPACES = (*[b""] * 9, b"salt", bytes(31) + b"x")


def text_of(key: bytes) -> bytes:
    """The tokens of a chunk, packed: as many texts as there are places in a prompt."""
    return blake2b(key[4:]).digest()


assert len(text_of(b"")) == 4 * CHUNK_TOKENS


def split(digests: bytes) -> list[bytes]:
    return [digests[at : at + WIDTH] for at in range(0, len(digests), WIDTH)]


class SegmentUser:
    """What one engine asks of segments. ``models``: whose prompts may be in its namespace."""

    def __init__(self, rng: random.Random, model: Model, models: list[Model]) -> None:
        self.rng, self.model = rng, model
        self.follows = {
            (number * CHUNK_TOKENS, before, key)
            for one in models
            for prompt in one.prompts
            for number, (before, key) in enumerate(pairwise((b"", *prompt)))
        }
        """Position, key before and key of every chunk there is."""
        self.able = all(group.kind == "full" for group in model.layouts[0].groups)
        self.found, self.indexed = 0, False

    def wants(self) -> bool:
        """Whether it is time for a search."""
        return self.rng.random() < (0.5 if self.indexed else 0.1)

    def is_prompt(self, digests: bytes) -> bool:
        """Whether a message names chunks that follow each other: some do not, for mischief."""
        steps = enumerate(pairwise((b"", *split(digests))))
        return all((i * CHUNK_TOKENS, *step) in self.follows for i, step in steps)

    def index(self, digests: bytes) -> m.IndexChunks:
        """To index the chunks of a prompt, or its last ones."""
        prompt = split(digests)
        first = self.rng.choice([0, 0, self.rng.randint(0, len(prompt))])
        return m.IndexChunks(
            space=self.rng.choice(_SPACES),
            digests=b"".join(prompt[first:]),
            width=WIDTH,
            tokens=b"".join(map(text_of, prompt[first:])),
            start=first * CHUNK_TOKENS,
            predecessor=b"".join(prompt[:first][-1:]),
        )

    def search(self) -> m.FindSegments:
        """To search a text made of parts of prompts."""
        rng, space = self.rng, self.rng.choice(_SPACES)
        parts = []
        for _ in range(rng.choice([1, 2, 3])):
            some = rng.choice(self.model.prompts)
            parts.append(rng.randbytes(4 * rng.choice([0, 0, 5])))
            parts += map(text_of, some[rng.randint(0, len(some)) :])
        tokens = b"".join(parts)
        start = rng.choice([0, 0, rng.randint(0, len(tokens) // 4)])
        least = rng.choice([0, 0, 2 * CHUNK_TOKENS])
        return m.FindSegments(
            space=space, tokens=tokens, width=WIDTH, first=start, min_tokens=least
        )

    def check(self, asked: m.FindSegments, reply: m.Segments) -> m.Lookup | None:
        """The lookup of what was found. Raises ``BrokenLawError`` for a match that is none."""
        keys, end = split(reply.digests), asked.first
        for segment in reply.segments:
            mine = keys[: segment.length // CHUNK_TOKENS]
            del keys[: len(mine)]
            begin, old = segment.new_start, segment.old_start
            there = asked.tokens[4 * begin : 4 * (begin + segment.length)]
            if begin < end or there != b"".join(map(text_of, mine)):
                raise BrokenLawError(f"law 10: {segment} of {mine} is not in the prompt")
            for i, step in enumerate(pairwise((segment.predecessor, *mine))):
                if (old + i * CHUNK_TOKENS, *step) not in self.follows:
                    raise BrokenLawError(f"law 10: {segment}: {step} was never stored so")
            if segment.length < asked.min_tokens:
                raise BrokenLawError(f"{segment} is shorter than {asked.min_tokens}")
            end = begin + segment.length
            self.found += 1
        if keys:
            raise BrokenLawError(f"{len(keys)} digests are of no segment")
        once = b"".join(dict.fromkeys(split(reply.digests)))
        readers = self.model.world.readers
        return m.Lookup("s", once, WIDTH, readers=readers) if once else None
