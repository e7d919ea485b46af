"""Checks of messages: a session ends only leases and reservations that it may (laws 2, 9, 11)."""

from __future__ import annotations

import pytest

from kvass import messages as m
from kvass.core.handlers.checks import check_request, named_namespace, split_keys
from kvass.errors import Refused
from kvass.types import Limits
from tests.core.rig import BOOT, Rig


def test_a_reservation_of_another_instance_is_not_yours(rig: Rig) -> None:
    one, two = rig.engine("one"), rig.engine("two")
    grant = one.reserve("a")
    for answer in (
        two.commit(grant.reservation),
        two.abort(grant.reservation),
        two.abort(grant.reservation, 0),
        two.hand_over(reservations=(grant.reservation,)),
    ):
        assert [x.code for x in answer] == ["not_yours"]
    assert rig.gauge("reservations", "quarantined_bytes") == (1, 0)


def test_unknown_reservations_wrong_boots_and_foreign_ranks_are_refused(rig: Rig) -> None:
    e = rig.engine(ranks=2)
    number = e.reserve("a").reservation
    for bad in (number + 1, 0, -1, 1 << 62):
        message = m.Commit(boot=BOOT, reservation=bad)
        assert rig.code(e.workers[0], message) == "unknown_reservation"
    for kind in (m.Commit, m.Abort):
        assert rig.code(e.workers[0], kind(boot=b"", reservation=number, rank=0)) == "wrong_boot"
        message2 = kind(boot=BOOT, reservation=number, rank=1)
        assert rig.code(e.workers[0], message2) == "bad_rank"
    assert rig.code(e.scheduler, m.Commit(boot=BOOT, reservation=number, rank=0)) == "bad_rank"
    assert rig.gauge("reservations", "quarantined_bytes") == (1, 0)


def test_an_unregistered_session_ends_no_lease_and_no_reservation(rig: Rig) -> None:
    number = rig.engine().reserve("a").reservation
    visitor = rig.open()
    for message in (
        m.Commit(boot=BOOT, reservation=number),
        m.Abort(boot=BOOT, reservation=number),
        m.HandedOver(boot=BOOT, reservations=(number,)),
        m.Release(boot=BOOT, lease=number),
    ):
        assert rig.code(visitor, message) == "not_registered"


def test_a_lease_of_another_instance_is_not_yours(rig: Rig) -> None:
    one, two = rig.engine("one"), rig.engine("two")
    one.store("a")
    lease = one.lookup("a").lease
    assert [x.code for x in two.release(lease)] == ["not_yours"]
    assert [x.code for x in two.give_back(lease)] == ["not_yours"]
    assert [x.code for x in two.hand_over(leases=(lease,))] == ["not_yours"]
    assert rig.gauge("leases", "pins") == (1, 1)


def test_a_rank_speaks_for_itself_only(rig: Rig) -> None:
    e = rig.engine(ranks=2)
    e.store("a")
    lease = e.lookup("a", readers=(0, 1)).lease
    assert rig.code(e.workers[0], m.Release(boot=BOOT, lease=lease, rank=1)) == "bad_rank"
    assert rig.code(e.workers[0], m.Release(boot=BOOT, lease=lease)) == "bad_rank"
    assert rig.code(e.workers[0], m.HandedOver(boot=BOOT, leases=(lease,))) == "bad_rank"
    assert rig.gauge("leases", "pins")[0] == 1


def test_a_lease_that_was_never_given_is_unknown(rig: Rig) -> None:
    e = rig.engine()
    assert [x.code for x in e.release(77)] == ["unknown_lease"]
    assert [x.code for x in e.release(0)] == ["unknown_lease"]
    assert [x.code for x in e.release(-1)] == ["unknown_lease"]


def test_another_boot_is_refused(rig: Rig) -> None:
    e = rig.engine()
    e.store("a")
    lease = e.lookup("a").lease
    for message in (
        m.Release(boot=b"old", lease=lease, rank=-1),
        m.HandedOver(boot=b"old", leases=(lease,)),
    ):
        assert rig.code(e.scheduler, message) == "wrong_boot"
    assert rig.gauge("leases", "pins") == (1, 1)


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
