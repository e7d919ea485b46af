"""Events and effects are plain values, and those of tiers can cross to another process."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import get_args

import msgspec
import numpy as np
import pytest

from kvass.core import machine
from kvass.core.effects import (
    ENDS,
    Effect,
    Event,
    FromTier,
    Loaded,
    Opened,
    Probed,
    Stored,
    TierReport,
)

KINDS = [*get_args(Event), *get_args(Effect), *ENDS, *ENDS.values()]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_no_field_can_be_assigned(kind: type[msgspec.Struct]) -> None:
    assert kind.__struct_config__.frozen


def test_an_assignment_to_a_field_is_an_error() -> None:
    opened = Opened(1)
    with pytest.raises(AttributeError):
        opened.uid = 3  # type: ignore[misc]


def test_the_machine_handles_every_event() -> None:
    assert set(machine._EVENTS) == {*get_args(Event), *ENDS.values()} - {FromTier}


@pytest.mark.parametrize("union", [reduce(or_, ENDS.values(), TierReport), reduce(or_, ENDS)])
def test_what_goes_to_a_tier_or_comes_from_it_is_told_apart_by_its_tag(
    union: type[msgspec.Struct],
) -> None:
    """A union of untagged structs has no decoder (control: ``Event``, most of which is none)."""
    msgspec.msgpack.Decoder(union, dec_hook=lambda kind, value: np.array(value))
    with pytest.raises(TypeError, match="union"):
        msgspec.msgpack.Decoder(Event, dec_hook=lambda kind, value: np.array(value))


def test_every_operation_of_a_tier_has_a_number_and_so_has_its_end() -> None:
    for kind in (*ENDS, *ENDS.values()):
        assert "op" in kind.__struct_fields__, kind
    for kind in (Probed, Loaded, Stored):
        assert kind.__struct_fields__[1] in ("held", "which")
