"""The end of a client's session: its own rows go first, and nothing else changes."""

from __future__ import annotations

from random import Random

from kvass import messages as m
from kvass.types import PAGE, Quota
from tests.core.rig import Engine
from tests.core.tier_rig import TierRig


def end(engine: Engine, session: int, tenant: str = "") -> int:
    reply = engine.rig.ask(engine.scheduler, m.EndSession(seq=9, session=session, tenant=tenant))
    return int(reply.rows)


PROMPT = [f"p{i}" for i in range(40)]


def test_sessions_that_come_and_go_break_no_invariant() -> None:
    """Random requests of several tenants and sessions; the rig checks the state at each step."""
    random = Random(5)
    quotas = (Quota("x", 9 * PAGE, 3 * PAGE),)
    rig = TierRig(pages=24, extent=2, core={"quotas": quotas})
    e = rig.ready()
    for _ in range(400):
        session, tenant = random.randrange(4), random.choice(["", "x"])
        prompt = [random.randrange(2) for _ in range(random.randint(1, 6))]
        names = ["".join(map(str, prompt[: i + 1])) for i in range(len(prompt))]
        kind = random.random()
        if kind < 0.15 and session:
            end(e, session, tenant)
        elif kind < 0.5:
            for reply in rig.look_up(e, *names, session=session, tenant=tenant):
                if reply.lease:
                    e.give_back(reply.lease)
        else:
            grant = e.begin(*names, session=session, tenant=tenant)
            if grant.reservation and random.random() < 0.9:
                e.commit(grant.reservation)
            elif grant.reservation:
                e.abort(grant.reservation, 0)
        if random.random() < 0.5:
            rig.answer_all()
        rig.replies(e.scheduler)
        rig.wait(random.random())
    assert rig.count("evicted_ended") > 5
