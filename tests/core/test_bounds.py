"""Every number, text and list that a client can send is bounded; ``test_fuzz`` sends them.

The fields are found by looking at the message types, so a new field is covered at once.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final, get_args

import numpy as np
import pytest
from msgspec import inspect

from kvass import messages as m
from kvass.core.effects import Faulted, Received, Stored, TierReport
from kvass.core.event_lines import line, parse
from kvass.types import GroupLayout, RankLayout
from kvass.wire import framing
from tests.core.rig import BOOT, WIDTH, digests
from tests.support.simulation.random_messages import any_message
from tests.support.simulation.random_models import random_model

KINDS: Final[tuple[type[m.Message], ...]] = get_args(m.FromClient)


def unbounded(kind: inspect.Type, path: str) -> Iterator[str]:
    """The places below ``path`` that anything fits in."""
    match kind:
        case inspect.IntType() | inspect.FloatType():
            if kind.ge is None or kind.le is None:
                yield path
        case inspect.StrType() | inspect.BytesType():
            if kind.max_length is None:
                yield path
        case inspect.VarTupleType() | inspect.ListType():
            if kind.max_length is None:
                yield path
            yield from unbounded(kind.item_type, f"{path}[]")
        case inspect.DictType():
            if kind.max_length is None:
                yield path
            yield from unbounded(kind.key_type, f"{path}{{}}")
            yield from unbounded(kind.value_type, f"{path}{{}}")
        case inspect.StructType():
            for field in kind.fields:
                yield from unbounded(field.type, f"{path}.{field.name}")
        case inspect.UnionType():
            for one in kind.types:
                yield from unbounded(one, path)
        case _:
            assert isinstance(kind, inspect.BoolType | inspect.NoneType | inspect.LiteralType), kind


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_every_field_of_a_client_is_bounded(kind: type) -> None:
    assert [*unbounded(inspect.type_info(kind), kind.__name__)] == []


def test_a_field_without_bounds_is_seen() -> None:
    found = [*unbounded(inspect.type_info(m.Welcome), "Welcome")]
    assert {"Welcome.boot", "Welcome.arena_bytes", "Welcome.limits.frame_bytes"} <= {*found}


def test_everything_a_stranger_of_the_simulator_says_decodes() -> None:
    rng = random.Random(0)
    models = [random_model(rng, "m")]
    for seq in range(1, 2000):
        message = any_message(rng, BOOT, models, seq)
        assert [*framing.from_clients().feed(framing.encode(message))] == [message]


def test_an_event_comes_back_from_its_line() -> None:
    lookup = m.Lookup(seq=3, request="r\n", digests=digests("a"), width=WIDTH)
    for event in (Received(1, lookup), Faulted(1, "bad_frame", "\n"), TierReport(0, {"up": True})):
        text = line(1.5, event)
        assert text.isprintable()
        assert parse(text) == (1.5, event)
    _, stored = parse(line(0.0, Stored(1, np.array([True, False]))))
    assert isinstance(stored, Stored)
    assert stored.which.tolist() == [True, False]


def test_the_line_of_a_huge_event_is_cut() -> None:
    event = Received(1, m.Lookup(seq=3, request="r", digests=bytes(1 << 20)))
    assert parse(line(0.0, event)) == (0.0, event)
    cut = line(0.0, event, max_chars=60_000)
    assert len(cut) < 70_000
    with pytest.raises(ValueError, match="line 1 column"):
        parse(cut)


def test_the_joined_name_of_many_layers_is_within_bounds() -> None:
    name = "+".join(
        f"language_model.model.layers.{i}.self_attn.attn@1234567890abcdef" for i in range(128)
    )
    group = GroupLayout("full", 16, (name,), (4096,))
    said = m.Register("e", {}, 256, rank=0, layout=RankLayout((group,)))
    (heard,) = framing.from_clients().feed(framing.encode(said))
    assert heard == said
