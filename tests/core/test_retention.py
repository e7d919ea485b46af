"""Retained rows: passed over while anything else can go, within their tenant's cap, for a time."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np

from kvass import messages as m
from kvass.types import PAGE, Quota
from tests.core.rig import BOOT, Rig
from tests.core.tier_rig import TierRig

PAGES = 16
KEPT = PAGES // 4


def test_random_hints_keep_the_cap_and_break_no_invariant() -> None:
    """Of several tenants, with clears, other quotas and loads; the rig checks each step."""
    random = Random(8)
    rig = TierRig(pages=24, extent=2, core={"quotas": (Quota("x", 12 * PAGE, 4 * PAGE),)})
    e, evicted = rig.ready(), 0
    for _ in range(500):
        fields: dict[str, Any] = {
            "tenant": random.choice(["", "x", "y"]),
            "session": random.randrange(3),
            "keep_s": random.choice([0, 0, 2, 60]),
        }
        prompt = [random.randrange(2) for _ in range(random.randint(1, 6))]
        names = ["".join(map(str, prompt[: i + 1])) for i in range(len(prompt))]
        kind = random.random()
        if kind < 0.02:
            rig.say(e.scheduler, m.Clear(seq=11))
        elif kind < 0.06:
            cap = random.choice([4, 12, 24]) * PAGE
            rig.ask(rig.open(own=True), m.SetQuota(seq=3, quota=Quota("x", cap)))
        elif kind < 0.1:
            end = m.EndSession(seq=4, session=1 + random.randrange(2), tenant=fields["tenant"])
            rig.ask(e.scheduler, end)
        elif kind < 0.5:
            for reply in rig.look_up(e, *names, **fields):
                if isinstance(reply, m.Matched) and reply.lease:
                    e.give_back(reply.lease)
        else:
            grant = e.begin(*names, **fields)
            if grant.reservation:
                message = m.Commit(boot=BOOT, reservation=grant.reservation, rank=0)
                rig.say(e.workers[0], message)
        rig.answer_all()
        rig.replies(e.scheduler)
        rig.wait(random.random())
        evicted = rig.count("evicted_capacity") + rig.count("evicted_handed_over")
    assert evicted > 20
    assert rig.count("not_kept_chunks") > 5


def test_a_clear_looks_at_no_retained_row_and_what_is_read_meanwhile_is_not_counted_twice() -> None:
    rig = Rig(pages=PAGES, core={"keep_share": 1.0})
    e, kept, tenant = rig.engine(), rig.machine.state.followers.kept, rig.machine.state.tenants
    e.store(*"abcdef", keep_s=2.0)
    lease = e.lookup(*"abc").lease
    every = kept._for_s
    kept._for_s = [0.0]  # type: ignore[assignment]  # no array: whoever looks at rows raises
    ns = next(iter(rig.machine.state.namespaces.values()))
    rig.machine.state.classes.clear([ns])
    kept._for_s = every
    assert tenant.default.kept_bytes == 0
    rig.machine.validate()
    rig.wait(3.0)
    e.store("x", keep_s=60.0)
    assert tenant.default.kept_bytes == PAGE
    rig.wait(1.5)  # a sweep, while three rows are read
    assert tenant.default.kept_bytes == PAGE
    e.release(lease)
    rig.finish()
    assert np.count_nonzero(kept._for_s) == 1
    rig.machine.validate()
