"""Random messages of hostile or confused clients.

Every message decodes; whether it is allowed is for the core to decide. Numbers are mostly small, so
that they meet ids and ranks that are in use.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

import msgspec

from kvass import messages as m
from kvass.types import RankLayout
from tests.support.simulation.random_models import (
    CHUNK_TOKENS,
    WIDTH,
    Model,
    random_layout,
    random_shapes,
)

Rng = random.Random
_LAYOUT: Final = random_layout(random.Random(1), [("full", 8, 0)])


_TIMES: Final = (0.0, 0.0, 10.0, 1e-12, 1e12, 1e9, 1e-12)


def _namespace(rng: Rng) -> bytes:
    return rng.choice([b"", b"x", bytes(32)])


def _number(rng: Rng) -> int:
    small = rng.randint(-3, 60)
    return rng.choice([0, 1, -1, small, small, 128, 1 << 30, -(1 << 31)])


def _rank(rng: Rng) -> int:
    return rng.choice([-1, 0, 0, 1, 2, 3, -2, 127, 128, 1 << 30])


def _boot(rng: Rng, boot: bytes) -> bytes:
    return boot if rng.random() < 0.85 else rng.choice([b"", b"x", bytes(16), boot[::-1]])


def _digests(rng: Rng, models: list[Model]) -> bytes:
    blob = b"".join(rng.choice(rng.choice(models).prompts))
    odd = rng.random()
    return blob[: rng.randint(0, len(blob))] if odd < 0.1 else blob * 2 if odd < 0.3 else blob


def _width(rng: Rng) -> int:
    return rng.choice([WIDTH, WIDTH, WIDTH, WIDTH, WIDTH, 2 * WIDTH, 0, -8, 7, 128])


def _layout(rng: Rng) -> RankLayout | None:
    if rng.random() < 0.1:
        return RankLayout(groups=())
    return None if rng.random() < 0.3 else random_layout(rng, random_shapes(rng, CHUNK_TOKENS))


def _register(rng: Rng, boot: bytes, models: list[Model], seq: int) -> m.FromClient:
    # A name of its own, or that of a real engine with an identity that contradicts it.
    name = rng.choice(["stranger", "stranger", "stranger2", "e0"])
    rank = rng.choice([-1, 0])
    terms = m.Register(
        seq=seq,
        instance=name,
        identity={"model": "stranger"},
        chunk_tokens=16,
        rank=rank,
        layout=None if rank < 0 else _LAYOUT,
    )
    if rng.random() < 0.5:
        return terms
    odd: list[dict[str, Any]] = [
        {"instance": ""},
        {"chunk_tokens": rng.choice([0, -16, 17, 32])},
        {"rank": _rank(rng)},
        {"ranks": rng.choice([2, 129, 0, -1])},
        {"world_size": rng.choice([2, 0])},
        {"shard": rng.choice([1, -1])},
        {"layout": _layout(rng)},
    ]
    return msgspec.structs.replace(terms, **rng.choice(odd))


def _reserve(rng: Rng, boot: bytes, models: list[Model], seq: int) -> m.FromClient:
    items = [
        m.ReserveItem(
            request=rng.choice(["r", "", "r" * 600]),
            digests=_digests(rng, models),
            first=rng.choice([0, 0, 0, _number(rng)]),
            groups=rng.choice([1, 1, 1, 3, 0, -1, 1 << 62]),
        )
        for _ in range(rng.choice([0, 1, 1, 1, 2, 3]))
    ]
    return m.Reserve(seq=seq, items=items, width=_width(rng))


def _lookup(rng: Rng, boot: bytes, models: list[Model], seq: int) -> m.FromClient:
    return m.Lookup(
        seq=seq,
        request="r",
        digests=_digests(rng, models),
        width=_width(rng),
        first=rng.choice([0, 0, 0, _number(rng)]),
        readers=rng.choice([None, None, (), (0,), (0, 0, 1), (_rank(rng),)]),
        spare=(0, 0, 0, 1, -1, 1 << 30)[seq % 6],
        budget_ms=rng.choice(_TIMES),
        prefill_tokens_s=rng.choice(_TIMES),
    )


def _prefetch(rng: Rng, boot: bytes, models: list[Model], seq: int) -> m.FromClient:
    return m.Prefetch(
        seq=seq,
        request=rng.choice(["r", "r", "r", ""]),
        digests=_digests(rng, models),
        width=_width(rng),
        namespace=_namespace(rng),
        budget_ms=rng.choice(_TIMES),
    )


def _clear(rng: Rng, boot: bytes, models: list[Model], seq: int) -> m.FromClient:
    everything = rng.random() < 0.05
    return m.Clear(
        seq=seq,
        namespace=_namespace(rng),
        everything=everything,
        tiers=everything and rng.random() < 0.5,
    )


def _hello(rng: Rng, boot: bytes, models: list[Model], seq: int) -> m.FromClient:
    low, high = rng.choice([(1, 1), (1, 1), (0, 9), (2, 9), (9, 2), (-5, 0)])
    return m.Hello(
        seq=seq,
        protocol_min=low,
        protocol_max=high,
        features=rng.choice([(), ("x",)]),
        clock_s=rng.choice([1000.0, 1000.0, 0.0, 1e9]),
    )


_MAKERS: list[Callable[[Rng, bytes, list[Model], int], m.FromClient]] = [
    _hello,
    _register,
    _register,
    _lookup,
    _reserve,
    _reserve,
    lambda r, b, _, seq: m.Ping(seq=seq),
    lambda r, b, _, seq: m.Status(seq=seq),
    _clear,
    _prefetch,
    lambda r, b, _, seq: m.Commit(boot=_boot(r, b), reservation=_number(r), rank=_rank(r)),
    lambda r, b, _, seq: m.Abort(boot=_boot(r, b), reservation=_number(r), rank=_rank(r)),
    lambda r, b, _, seq: m.Release(boot=_boot(r, b), lease=_number(r), rank=_rank(r)),
    lambda r, b, _, seq: m.HandedOver(
        boot=_boot(r, b), leases=(_number(r), _number(r)), reservations=(_number(r),)
    ),
]


def any_message(rng: Rng, boot: bytes, models: list[Model], seq: int) -> m.FromClient:
    """Any message of a client. Requests carry ``seq``."""
    return rng.choice(_MAKERS)(rng, boot, models, seq)
