"""Checks of messages: one ends only leases and reservations that it may (laws 2, 9, 11)."""

from __future__ import annotations

import pytest

from kvass.core.handlers.checks import check_request, named_namespace, split_keys
from kvass.errors import Refused
from kvass.types import Limits
from tests.core.rig import Rig


@pytest.mark.parametrize("width", [8, 32])
def test_digests_become_one_key_each(width: int) -> None:
    blob = bytes(range(width)) + bytes(width)
    keys = split_keys(blob, width, 2, Limits())
    assert [key.tobytes() for key in keys] == [bytes(range(width)).ljust(32, b"\0"), bytes(32)]


@pytest.mark.parametrize(
    ("size", "width", "first", "code"),
    [
        (16, 7, 0, "bad_value"),
        (33, 33, 0, "bad_value"),
        (15, 8, 0, "bad_value"),
        (16, 8, 3, "bad_value"),
        (16, 8, -1, "bad_value"),
        (40, 8, 0, "limit"),
    ],
)
def test_digests_that_are_no_keys_are_refused(size: int, width: int, first: int, code: str) -> None:
    with pytest.raises(Refused) as refused:
        split_keys(bytes(size), width, first, Limits(keys_per_message=4))
    assert refused.value.code == code


@pytest.mark.parametrize("request_id", ["", "x" * 5])
def test_a_request_must_have_a_name_of_bounded_length(request_id: str) -> None:
    check_request("x" * 4, Limits(request_id_bytes=4))
    with pytest.raises(Refused):
        check_request(request_id, Limits(request_id_bytes=4))


def test_a_namespace_that_does_not_exist_is_refused(rig: Rig) -> None:
    digest = rig.engine().namespace
    assert named_namespace(rig.machine.state, digest).digest == digest
    with pytest.raises(Refused, match="no such digest"):
        named_namespace(rig.machine.state, bytes(32))
