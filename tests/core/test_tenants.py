"""Tenants in the core: who pays, what is reserved, who makes room (laws 6 and 12)."""

from __future__ import annotations

from typing import Any

import pytest

from kvass import messages as m
from kvass.core.clients.tenants import MOST, SHOWN
from kvass.errors import Refused
from kvass.types import MOST_QUOTAS, NO_CAP, PAGE, Quota
from tests.core.rig import Engine, Rig


def quota(tenant: str, cap: int | None = None, reserved: int = 0) -> Quota:
    """In pages."""
    return Quota(tenant, NO_CAP if cap is None else cap * PAGE, reserved * PAGE)


def divided(*quotas: Quota, pages: int = 32, extent: int = 2) -> Rig:
    return Rig(pages=pages, extent=extent, core={"quotas": quotas})


def store(engine: Engine, tenant: str, *names: object) -> None:
    for name in names:
        engine.store(name, tenant=tenant)


def names(tenant: str, count: int, first: int = 0) -> list[str]:
    return [f"{tenant}{i}" for i in range(first, first + count)]


def held(engine: Engine, *keys: str) -> int:
    return sum(engine.holds(key) for key in keys)


def figures(rig: Rig, tenant: str) -> dict[str, Any]:
    return next(t for t in rig.status["tenants"] if t["tenant"] == tenant)


def change(rig: Rig, given: Quota, remove: bool = False) -> Any:
    connection = rig.open(own=True)
    reply = rig.ask(connection, m.SetQuota(seq=3, quota=given, remove=remove))
    rig.lose(connection)
    return reply


# ---------------------------------------------------------------- change


def refused(rig: Rig, given: Quota, remove: bool = False) -> str:
    reply = change(rig, given, remove)
    assert isinstance(reply, m.Error), reply
    return f"{reply.code}: {reply.text}"


def test_quotas_that_cannot_be_stop_the_start() -> None:
    with pytest.raises(Refused, match="L1 has"):
        divided(quota("a", reserved=20), quota("b", reserved=20))


# ---------------------------------------------------------------- figures


def test_invented_tenants_cost_bounded_memory_and_gain_nothing() -> None:
    rig = divided(quota("calm", reserved=8))
    e = rig.engine()
    store(e, "calm", *names("calm", 8))
    for i in range(300):
        e.lookup("no", tenant=f"invented{i}")
        e.store(f"i{i}", tenant=f"invented{i}")
    e.lookup("no", tenant="\n<script>" * 400)
    shown = rig.status["tenants"]
    assert len(shown) == SHOWN + 3
    other = figures(rig, "other")
    assert other["lookups"] == 300 - SHOWN + 1
    assert sum(t["lookups"] for t in shown) == 301
    assert held(e, *names("calm", 8)) == 8
    assert {t["tenant"] for t in shown if t["l1_bytes"]} == {"calm", "default"}


def test_there_are_so_many_quotas_and_no_more() -> None:
    rig = divided()
    rig.engine().lookup("no", tenant="passing")
    for i in range(MOST_QUOTAS):
        assert isinstance(change(rig, quota(f"t{i}")), m.QuotaSet)
    assert "limit" in refused(rig, quota("one-more"))
    assert isinstance(change(rig, quota("t0"), remove=True), m.QuotaSet)
    assert isinstance(change(rig, quota("one-more")), m.QuotaSet)
    for i in range(2 * MOST):
        change(rig, quota(f"new{i}"))
        change(rig, quota(f"new{i}"), remove=True)
    assert len(rig.status["tenants"]) <= MOST
