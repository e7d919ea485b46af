"""Prompts that begin like earlier ones and part from them anywhere, and what ``kvass simulate``
says that they hit."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from kvass.simulate.player import Model, Player, Setting
from kvass.simulate.traces import Trace, TraceRequest
from kvass.types import GroupLayout


def branches(seed: int, count: int, longest: int, unit: int) -> list[list[int]]:
    """``count`` prompts of at most ``longest`` tokens. None ends with a multiple of ``unit``: its
    last chunk would be no hit, which a trace does not say."""
    rng = random.Random(seed)
    prompts = [rng.choices(range(4, 60), k=longest)]
    while len(prompts) < count:
        trunk = rng.choice(prompts)
        own = rng.choices(range(4, 60), k=longest)
        at = rng.randrange(len(trunk))
        prompts.append([*trunk[:at], *own[at:]])
    ends = [rng.randrange(unit, longest) for _ in prompts]
    return [one[: end - (end % unit == 0)] for one, end in zip(prompts, ends, strict=True)]


def simulated(
    groups: Sequence[GroupLayout], chunk: int, prompts: list[list[int]], interval: int | None
) -> list[int]:
    """How many tokens of each prompt hit, with windows every ``interval`` tokens."""
    requests = []
    for number, tokens in enumerate(prompts):
        ends = range(chunk, len(tokens) + 1, chunk)
        ids = [blake2b(array("I", tokens[:end]).tobytes(), digest_size=8).digest() for end in ends]
        pieces = np.frombuffer(b"".join(ids), np.uint64)
        requests.append(TraceRequest(float(number), len(tokens), 1, pieces, name=number))
    model, setting = Model(chunk, tuple(groups)), Setting(1 << 30, chunk, windows=interval)
    *_, outcome = Player(setting, {0: model}).play(Trace("branches", chunk, requests))
    return outcome.hits
