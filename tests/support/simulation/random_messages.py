"""Random messages of hostile or confused clients.

Every message decodes; whether it is allowed is for the core to decide. Numbers are mostly small, so
that they meet ids and ranks that are in use.
"""

from __future__ import annotations

import random
from typing import Any, Final, get_args

import msgspec

from kvass import messages as m
from tests.support.simulation.random_models import (
    CHUNK_TOKENS,
    WIDTH,
    Model,
    random_layout,
    random_shapes,
)

_OF_COMMANDS: Final = (m.SetQuota, m.ClearTenant, m.EmptyTier, m.EndSession, m.AskSession)
_KINDS: Final = (
    *(k for k in get_args(m.FromClient) if k not in _OF_COMMANDS),
    *(m.Register, m.Reserve),
)
_LAYOUT: Final = random_layout(random.Random(1), [("full", 8, 0)])
_TIMES: Final = (0.0, 0.0, 10.0, 1e-12, 1e12, 1e9, 1e-12)
_RANKS: Final = (-1, 0, 0, 1, 2, 3, -2, 127, 128, 1 << 30)
_VALUES: Final[dict[str, tuple[Any, ...]]] = {
    "absent_chunk": (0, 1, -1),
    "again": (False, False, True),
    "arena": ("/dev/shm/other",),
    "at_value": _TIMES,
    "bytes": (0, 1, 1 << 53),
    "differing_rows": (0, 1),
    "wrong_rows": (0, 1),
    "answer_tokens": (0, 5, 1 << 53),
    "repeated_tokens": (0, 5, 1 << 53),
    "hit_tokens": (0, 5, 1 << 53),
    "largest_difference": _TIMES,
    "load_bytes": (0, 1 << 53),
    "load_s": _TIMES,
    "loads": (0, 1),
    "lookup_tokens": (0, 5),
    "lookups": (0, 5),
    "not_compared": (0, 1),
    "rows": (0, 5),
    "sampled": (0.0, 1.0, 1e12),
    "saved_s": _TIMES,
    "budget_ms": _TIMES,
    "chunk_tokens": (0, -16, 17, 32),
    "client": ("", "stranger"),
    "clock_s": (1000.0, 1000.0, 0.0, 1e9),
    "detail": ("", "d" * 600),
    "engine": ("", "e0", "x"),
    "everything": (*[False] * 19, True),
    "features": ((), ("x", "y")),
    "groups": (1, 1, 1, 3, 0, -1, 1 << 62),
    "if_absent": ("", "other_salt", "x"),
    "instance": ("",),
    "limit": (20, 1, 0, -1, 1 << 30),
    "local_tokens": (0, 32, 1 << 53),
    "namespace": (b"", b"x", bytes(32)),
    "min_tokens": (0, 0, 1, CHUNK_TOKENS, 1 << 53),
    "predecessor": (b"", b"", bytes(WIDTH), b"x"),
    "prefill_tokens_s": _TIMES,
    "prompt_tokens": (0, 100, 1 << 53),
    "protocol_max": (1, 1, 1, 9, 2, 0),
    "protocol_min": (1, 1, 1, 2, 9, -5),
    "rank": _RANKS,
    "ranks": (2, 129, 0, -1),
    "failed": (False, True),
    "reported": (False, True),
    "request": ("r", "r", "r", "", "r" * 600),
    "shard": (1, -1),
    "space": (b"", b"salt", bytes(32), bytes(33)),
    "spare": (0, 0, 0, 1, -1, 1 << 30),
    "terms_of": ((), (b"",), (b"x", bytes(32))),
    "tiers": (False, True),
    "when_s": _TIMES,
    "why": ("no_daemon", "load_failed_here", "", "x" * 600),
    "wants_arena": (False, False, True),
    "within_s": _TIMES,
    "width": (*[WIDTH] * 5, 2 * WIDTH, 0, -8, 7, 128),
    "world_size": (2, 0),
    "writing": (False, True),
}
"""By the name of a field. ``_Maker.value`` makes those that are not here."""


class _Maker:
    """Makes values of fields."""

    def __init__(self, rng: random.Random, boot: bytes, models: list[Model]) -> None:
        self.rng, self.boot, self.models = rng, boot, models

    def fields(self, kind: type[msgspec.Struct]) -> dict[str, Any]:
        names = [
            name
            for name in kind.__struct_fields__
            if name not in ("seq", "tenant", "session", "keep_s", "then_s")
        ]
        return {name: self.value(name, kind) for name in names}

    def value(self, field: str, kind: type | None = None) -> Any:
        """A value of ``field`` of ``kind``."""
        rng, odd = self.rng, self.rng.random()
        match field:
            case "boot":
                return self.boot if odd < 0.85 else rng.choice([b"", b"x", self.boot[::-1]])
            case "digests":
                blob = b"".join(rng.choice(rng.choice(self.models).prompts))
                cut = blob[: rng.randint(0, len(blob))]
                return cut if odd < 0.1 else blob * 2 if odd < 0.3 else blob
            case "blocks" | "first_blocks":
                return rng.choice([b"", b"", b"x", bytes(WIDTH), rng.randbytes(40 * WIDTH)])
            case "present":
                return tuple(self.value("digests") for _ in range(rng.choice([0, 1, 2])))
            case "tokens":
                return bytes(4 * CHUNK_TOKENS * rng.randint(0, 8) + (odd < 0.1))
            case "first" | "start" if kind in (m.IndexChunks, m.FindSegments):
                return self.number() % (1 << 53) if odd < 0.25 else 0
            case "first" | "since":
                return self.number() if odd < 0.25 else 0
            case "lease" | "reservation":
                return self.number()
            case "leases" | "reservations":
                return (self.number(), self.number())
            case "readers":
                some = (rng.choice(_RANKS),)
                return rng.choice([None, None, (), (0,), (0, 0), (0, 0, 1), some])
            case "items":
                items = range(rng.choice([0, 1, 1, 1, 2, 3]))
                return [m.ReserveItem(**self.fields(m.ReserveItem)) for _ in items]
            case "groups" if kind is m.ShadowReport:
                return (m.ShadowGroup(**self.fields(m.ShadowGroup)),)
            case "notes":
                return tuple(m.LookupNote(**self.fields(m.LookupNote)) for _ in range(3))
            case "results":
                return tuple(m.LookupResult(**self.fields(m.LookupResult)) for _ in range(2))
            case "tiers" if kind is m.LookupResult:
                return (rng.choice([0, 5, 1 << 53]), 16)
            case "layout":
                shapes = random_shapes(rng, CHUNK_TOKENS) if odd < 0.6 else []
                return random_layout(rng, shapes) if odd < 0.7 else None
        return rng.choice(_VALUES[field])

    def number(self) -> int:
        small = self.rng.randint(-3, 60)
        return self.rng.choice([0, 1, -1, small, small, 128, 1 << 30, -(1 << 31)])

    def register(self) -> m.Register:
        """A name of its own, or that of a real engine with an identity that contradicts it."""
        rng = self.rng
        rank = rng.choice([-1, 0])
        terms = m.Register(
            instance=rng.choice(["stranger", "stranger", "stranger2", "e0"]),
            identity={"model": "stranger"},
            chunk_tokens=16,
            rank=rank,
            layout=None if rank < 0 else _LAYOUT,
        )
        if rng.random() < 0.5:
            fields = ["instance", "chunk_tokens", "rank", "ranks", "world_size", "shard", "layout"]
            odd = rng.choice(fields)
            setattr(terms, odd, self.value(odd))
        return terms


def any_message(rng: random.Random, boot: bytes, models: list[Model], seq: int) -> m.FromClient:
    """Any message of a client. Requests carry ``seq``."""
    maker, kind = _Maker(rng, boot, models), rng.choice(_KINDS)
    made: m.FromClient = maker.register() if kind is m.Register else kind(**maker.fields(kind))
    if isinstance(made, m.Request):
        made.seq = seq
    return made
