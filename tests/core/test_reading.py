"""Lookups, prefetches and releases (laws 5-7 and 12): a hit is pinned for named ranks."""

from __future__ import annotations

import pytest

from kvass import messages as m
from tests.core.rig import BOOT, WIDTH, Rig, digests, layout
from tests.core.tier_rig import TierRig, prefetch

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


def test_without_readers_rank_0_owes_it(rig: Rig) -> None:
    e = rig.engine(ranks=2)
    e.store("a")
    e.release(e.lookup("a").lease, 0)
    assert held(rig) == NOTHING_HELD


def test_after_the_handover_the_scheduler_gives_nothing_back(rig: Rig) -> None:
    e = rig.engine()
    e.store("a")
    lease = e.lookup("a").lease
    e.hand_over(leases=(lease,))
    (error,) = e.give_back(lease)
    assert error.code == "bad_rank"
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


def test_a_prefetch_holds_nothing() -> None:
    rig = TierRig()
    e = rig.ready()
    rig.only_in_tiers(e, "a", "b")
    looker = rig.open()
    rig.replies(looker)
    rig.say(looker, prefetch(e, "a", "b"))
    rig.answer_all()
    assert [(r.seq, r.chunks) for r in rig.replies(looker)] == [(5, 2)]
    assert rig.quiet()
    rig.begin(e, "a", "b")
    assert rig.replies(e.scheduler)[0].chunks == 2


def test_prefetching_for_others_is_forbidden() -> None:
    rig = TierRig()
    e = rig.ready()
    assert rig.code(e.scheduler, prefetch(e, "a")) == "forbidden"
    unknown = m.Prefetch(seq=5, request="p", digests=digests("a"), width=WIDTH, namespace=bytes(32))
    assert rig.code(rig.open(), unknown) == "bad_value"
    assert rig.code(e.workers[0], m.Prefetch(seq=5, request="p", digests=b"")) == "bad_rank"


def test_the_rest_of_a_prompt_is_waited_for_its_share_of_the_time() -> None:
    rig = TierRig(pages=256)
    e = rig.ready()
    for start in range(0, 100, 10):
        e.store(*range(start, start + 10))
        rig.answer_all()
    rig.begin(e, *range(101), budget_ms=16_160.0, prefill_tokens_s=100.0)
    assert rig.machine.state.promotions.next_due == pytest.approx(rig.now + 0.16)
    rig.wait(0.2)
    assert [r.chunks for r in rig.replies(e.scheduler)] == [100]
    rig.begin(e, *range(200, 300), budget_ms=20_000.0, prefill_tokens_s=100.0)
    assert rig.machine.state.promotions.next_due == pytest.approx(rig.now + 20)
