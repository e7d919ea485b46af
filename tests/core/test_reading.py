"""Laws 5-7 and 12, reading: a match is pinned for named ranks, until they release or it lapses."""

from __future__ import annotations

import pytest

from kvass import messages as m
from tests.core.rig import BOOT, LEASE_S, WIDTH, Rig, digests, layout

NOTHING_HELD = (0, 0)


def held(rig: Rig) -> tuple[int, ...]:
    return rig.gauge("leases", "pins")


def test_nothing_stored_is_a_miss_without_a_lease(rig: Rig) -> None:
    found = rig.engine().lookup("a", "b")
    assert (found.chunks, found.lease, found.boot) == (0, 0, BOOT)
    assert held(rig) == NOTHING_HELD


def test_a_match_starts_at_first_and_pins_nothing_before_it(rig: Rig) -> None:
    e = rig.engine()
    e.store("a", "b", "c")
    found = e.lookup("a", "b", "c", first=1)
    assert (found.first, found.chunks, len(found.slots[0])) == (1, 3, 2)
    assert held(rig) == (1, 2)


@pytest.mark.parametrize("first", [1, 2])
def test_nothing_from_first_on_is_a_miss(rig: Rig, first: int) -> None:
    e = rig.engine()
    e.store("a")
    found = e.lookup("a", "b", first=first)
    assert (found.chunks, found.lease) == (first, 0)


def test_a_chunk_needs_its_row_in_every_group(rig: Rig) -> None:
    e = rig.engine(layout=layout(1, 2))
    e.store("a", "b", groups=3)
    e.store("c", groups=2)
    found = e.lookup("a", "b", "c")
    assert found.chunks == 2
    assert [len(s) for s in found.slots] == [2, 2]


def test_every_named_reader_owes_one_release(rig: Rig) -> None:
    e = rig.engine(ranks=3)
    e.store("a")
    lease = e.lookup("a", readers=(0, 2)).lease
    e.hand_over(leases=(lease,))
    assert e.release(lease, 1) == []
    e.release(lease, 0)
    assert held(rig)[0] == 1
    e.release(lease, 2)
    assert held(rig) == NOTHING_HELD


def test_a_second_release_by_one_rank_changes_nothing(rig: Rig) -> None:
    e = rig.engine(ranks=2)
    e.store("a")
    lease = e.lookup("a", readers=(0, 1)).lease
    e.hand_over(leases=(lease,))
    assert e.release(lease, 0) == e.release(lease, 0) == []
    assert held(rig)[0] == 1


def test_without_readers_rank_0_owes_it(rig: Rig) -> None:
    e = rig.engine(ranks=2)
    e.store("a")
    e.release(e.lookup("a").lease, 0)
    assert held(rig) == NOTHING_HELD


def test_a_lease_lapses_at_its_deadline_and_a_late_release_is_no_error(rig: Rig) -> None:
    e = rig.engine()
    e.store("a")
    found = e.lookup("a")
    assert found.deadline_s == rig.now + LEASE_S == rig.machine.next_deadline()
    rig.wait(LEASE_S - 0.01)
    assert held(rig) == (1, 1)
    rig.wait(0.01)
    assert held(rig) == NOTHING_HELD
    assert e.release(found.lease) == []
    assert rig.count("lapsed_leases") == 1


def test_after_the_handover_the_scheduler_gives_nothing_back(rig: Rig) -> None:
    e = rig.engine()
    e.store("a")
    lease = e.lookup("a").lease
    e.hand_over(leases=(lease,))
    (error,) = e.give_back(lease)
    assert error.code == "bad_rank"
    assert held(rig) == (1, 1)


def test_losing_the_scheduler_cancels_only_what_was_not_handed_over(rig: Rig) -> None:
    e = rig.engine()
    e.store("a")
    kept, _ = e.lookup("a").lease, e.lookup("a").lease
    e.hand_over(leases=(kept,))
    rig.lose(e.scheduler)
    assert held(rig) == (1, 1)
    e.release(kept)
    assert held(rig) == NOTHING_HELD


def test_losing_a_rank_releases_for_it(rig: Rig) -> None:
    e = rig.engine(ranks=2)
    e.store("a")
    lease = e.lookup("a", readers=(0, 1)).lease
    e.hand_over(leases=(lease,))
    rig.lose(e.workers[1])
    assert held(rig)[0] == 1
    e.release(lease, 0)
    assert held(rig) == NOTHING_HELD


def test_a_digest_named_twice_is_pinned_once_per_lease(rig: Rig) -> None:
    e = rig.engine()
    e.store("a")
    e.release(e.lookup("a", "a").lease)
    assert rig.gauge("rows", "pins") == (1, 0)


# ---------------------------------------------------------------- refusals


def test_a_lease_of_another_instance_is_not_yours(rig: Rig) -> None:
    one, two = rig.engine("one"), rig.engine("two")
    one.store("a")
    lease = one.lookup("a").lease
    assert [x.code for x in two.release(lease)] == ["not_yours"]
    assert [x.code for x in two.give_back(lease)] == ["not_yours"]
    assert [x.code for x in two.hand_over(leases=(lease,))] == ["not_yours"]
    assert held(rig) == (1, 1)


def test_a_rank_speaks_for_itself_only(rig: Rig) -> None:
    e = rig.engine(ranks=2)
    e.store("a")
    lease = e.lookup("a", readers=(0, 1)).lease
    assert rig.code(e.workers[0], m.Release(boot=BOOT, lease=lease, rank=1)) == "bad_rank"
    assert rig.code(e.workers[0], m.Release(boot=BOOT, lease=lease)) == "bad_rank"
    assert rig.code(e.workers[0], m.HandedOver(boot=BOOT, leases=(lease,))) == "bad_rank"
    assert held(rig)[0] == 1


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
    assert held(rig) == (1, 1)


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"width": 0}, "bad_value"),
        ({"width": -8}, "bad_value"),
        ({"width": 7}, "bad_value"),
        ({"width": 65}, "bad_value"),
        ({"digests": b"123456789"}, "bad_value"),
        ({"first": -1}, "bad_value"),
        ({"first": 2}, "bad_value"),
        ({"spare": -1}, "bad_value"),
        ({"request": ""}, "bad_value"),
        ({"request": "x" * 513}, "bad_value"),
        ({"digests": bytes(WIDTH * 5)}, "limit"),
    ],
)
def test_a_lookup_that_makes_no_sense_is_refused(wrong: dict[str, object], code: str) -> None:
    rig = Rig(keys_per_message=4)
    e = rig.engine()
    good = {"request": "r", "digests": digests("a"), "width": WIDTH}
    assert rig.code(e.scheduler, m.Lookup(seq=3, **{**good, **wrong})) == code  # type: ignore[arg-type]


def test_open_leases_are_limited(rig: Rig) -> None:
    rig = Rig(leases_per_instance=2)
    e, other = rig.engine(), rig.engine("other")
    e.store("a")
    lease, _ = e.lookup("a").lease, e.lookup("a").lease
    assert e.lookup("a").code == "limit"
    assert other.lookup("a").lease
    e.give_back(lease)
    assert e.lookup("a").lease


def test_only_a_scheduler_looks_up(rig: Rig) -> None:
    e = rig.engine()
    message = m.Lookup(seq=3, request="r", digests=digests("a"), width=WIDTH)
    assert rig.code(e.workers[0], message) == "bad_rank"
    assert rig.code(rig.open(), message) == "not_registered"


def test_a_lookup_before_all_ranks_registered_is_a_miss(rig: Rig) -> None:
    scheduler = rig.open()
    rig.register(scheduler, ranks=2)
    message = m.Lookup(seq=3, request="r", digests=digests("a"), width=WIDTH)
    assert rig.ask(scheduler, message).chunks == 0
