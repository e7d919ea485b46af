"""One end per effect, whatever a tier does, and nobody else waits for it."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from kvass.core.effects import (
    Emptied,
    EpochIs,
    Loaded,
    Probed,
    Stored,
    TierClear,
    TierEpoch,
    ToTier,
)
from kvass.daemon.tier_process.executor import FIRST_PAUSE_S
from kvass.daemon.tier_process.reports import reportable
from kvass.errors import TierDown
from tests.daemon.tier_rig import (
    PAGE,
    SPACE,
    WAIT_S,
    Gate,
    Rig,
    Trouble,
    key,
    load,
    probe,
    rig,
    store,
)
from tests.support.tiers.memory import MemoryTier
from tests.support.waiting import eventually

# ---------------------------------------------------------------- trouble


@pytest.mark.parametrize(
    "error",
    [TierDown("gone"), RuntimeError("a bug"), OSError(5, "EIO"), SystemExit(3), MemoryError()],
    ids=lambda e: type(e).__name__,
)
def test_whatever_it_raises_every_operation_ends_as_failed(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    trouble = Trouble(error)
    with rig(MemoryTier(trouble)) as made:
        for op in range(0, 50, 5):
            made.submit(probe(op, 1, 2))
            made.submit(load(op + 1, 1, 1))
            made.submit(store(op + 2, 1, 1))
            made.submit(TierEpoch(0, op + 3, SPACE, fresh=1))
            made.submit(TierClear(0, op + 4))
        ends = made.ends(50)
        for op in range(0, 50, 5):
            probed, loaded, stored, epoch, emptied = (ends[op + i] for i in range(5))
            assert type(probed) is Probed
            assert probed.held.tolist() == [False, False]
            assert type(loaded) is Loaded
            assert loaded.which.tolist() == [False]
            assert type(stored) is Stored
            assert stored.which.tolist() == [False]
            assert epoch == EpochIs(op + 3, None)
            assert type(emptied) is Emptied
            assert not emptied.done
            assert emptied.why in ("", str(error) or type(error).__name__)
        assert trouble.calls <= 8, "one per thread at most, then its work was refused"
        assert made.reported(up=False, errors=trouble.calls, refused=50 - trouble.calls)
        downs = [r for r in caplog.records if "tier0 is down" in r.message]
        assert len(downs) == 1
        bugs = [r for r in caplog.records if r.levelno == logging.ERROR]
        assert len(bugs) == (0 if isinstance(error, TierDown) else 1)


def test_answers_of_the_wrong_number_are_trouble() -> None:
    tier = MemoryTier()
    tier.probe = lambda keys: [True]  # type: ignore[method-assign]
    with rig(tier) as made:
        assert made.ask(probe(1, 1, 2)).held.tolist() == [False, False]
        assert made.reported(up=False, errors=1)


def test_a_tier_that_is_down_is_tried_by_one_call_and_another_tier_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kvass")
    trouble = Trouble(TierDown("the cable is out"))
    bad, good = MemoryTier(trouble), MemoryTier()
    good.records[key(1)] = []
    with rig(bad, good) as made:
        assert not made.ask(probe(0, 1)).held.any()
        for op in range(1, 101):
            made.submit(probe(op, 1))
        made.ends(100)
        assert trouble.calls == 1
        assert made.reported(up=False)
        assert made.ask(probe(101, 1, tier=1)).held.all()
        made.clock.now += FIRST_PAUSE_S
        made.ask(probe(102, 1))  # tries, in vain
        assert trouble.calls == 2
        made.clock.now += FIRST_PAUSE_S  # not long enough any more
        made.ask(probe(103, 1))
        assert trouble.calls == 2
        trouble.error = None
        made.clock.now += FIRST_PAUSE_S
        made.ask(probe(104, 1))
        made.ask(probe(105, 1))
        assert trouble.calls == 4
        assert made.reported(0, name="tier0", up=True, trouble="", errors=2, refused=101)
        assert made.reported(1, name="tier1", up=True, errors=0, refused=0)
    told = [r.message for r in caplog.records]
    assert told == ["tier tier0 is down: the cable is out", "tier tier0 is back"]


def test_what_cannot_be_written_is_still_read() -> None:
    tier = MemoryTier(Trouble(TierDown("read-only"), "store"))
    tier.records[key(1)] = [b"\1" * PAGE, b"\2" * PAGE]
    with rig(tier) as made:
        assert not made.ask(store(1, 2, 2)).which.any()
        assert made.ask(load(2, 1, 4)).which.all()
        assert not made.ask(store(3, 2, 2)).which.any()
        assert made.reported(up=False, trouble="read-only", errors=1, refused=1)


def test_what_is_logged_of_a_tiers_bug_has_no_secrets(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ValueError("no route to redis:h?password=hunter2&db=1")
    except ValueError as cause:
        error = RuntimeError("http://me:hunter2@host/ said no")
        error.__cause__ = cause
    with rig(MemoryTier(Trouble(error))) as made:
        made.ask(probe(0, 1))
        assert made.reported(up=False, errors=1)
    (said,) = [x.getMessage() for x in caplog.records if "it raised" in x.getMessage()]
    assert "hunter2" not in caplog.text
    assert "no route to redis:h?password=***\n" in said
    assert "RuntimeError: http://***@host/ said no" in said
    assert "Traceback" in said
    assert "perform" in said


# ---------------------------------------------------------------- slow and full


def test_bulk_loads_and_stores_delay_no_probe() -> None:
    gate = Gate("load", "store")
    with rig(MemoryTier(gate)) as made:
        for op in range(20):
            made.submit(load(op, op, 1))
            made.submit(store(100 + op, op, 2))
        made.submit(probe(200, 1))
        made.submit(TierEpoch(0, 201, SPACE, fresh=1))
        assert set(made.ends(2)) == {200, 201}
        for _ in range(6):
            assert gate.entered.acquire(timeout=WAIT_S), "four loads and two stores run"
        assert not gate.entered.acquire(timeout=0.05)
        gate.open.set()
        assert len(made.ends(40)) == 40


def test_a_hanging_call_shuts_its_tier_until_it_returns(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvass")
    gate = Gate("load")
    with rig(MemoryTier(gate), MemoryTier(), slow_s=10.0) as made:
        for op in range(6):
            made.submit(load(op, 1, op))
        for _ in range(4):
            assert gate.entered.acquire(timeout=WAIT_S)
        made.clock.now += 9
        made.ask(probe(10, 1))
        made.clock.now += 2
        made.submit(probe(11, 1))
        assert set(made.ends(3)) == {11, 4, 5}, "what did not run was refused"
        assert made.reported(up=False, refused=3, errors=0)
        made.ask(probe(12, 1, tier=1))
        gate.open.set()
        assert set(made.ends(4)) == {0, 1, 2, 3}
        assert made.reported(up=True, queued=0)
        made.ask(probe(13, 1))
        assert made.reported(up=True, refused=3)
    told = [r.message for r in caplog.records]
    assert told == [
        "tier tier0 is down: a call has been running for more than 10 s",
        "tier tier0 is back",
    ]


def test_a_clear_may_take_as_long_as_it_takes() -> None:
    """A million objects; meanwhile the tier answers, loads and stores."""
    gate = Gate("clear")
    with rig(MemoryTier(gate), slow_s=10.0) as made:
        made.submit(TierClear(0, 1))
        assert gate.entered.acquire(timeout=WAIT_S)
        made.clock.now += 3600
        asked: list[ToTier] = [store(2, 1, 1), probe(3, 1), load(4, 1, 2)]
        for op, effect in enumerate(asked, 2):
            end = made.ask(effect)
            assert (end.held if op == 3 else end.which).all(), effect
        assert made.reported(up=True, refused=0)
        assert not made.executors[0].close(0.05), "it is still waited for"
        gate.open.set()
        assert made.end(1).done


# ---------------------------------------------------------------- registration, reports, the end


def test_memory_is_registered_before_anything_is_asked() -> None:
    class Registering(MemoryTier):
        def register_memory(self, arena: Any) -> None:
            self.hook("register")
            self.arena = arena

    gate = Gate("register")
    asked: list[str] = []
    tier = Registering(gate)
    with rig(tier, MemoryTier()) as made:
        made.submit(probe(0, 1))
        made.ask(probe(1, 1, tier=1))
        assert made.events.empty()
        tier.hook = lambda method: asked.append(method) or gate(method)  # type: ignore[func-returns-value]
        gate.open.set()
        made.end(0)
        made.ask(load(2, 1, 1))
        assert tier.arena is made.arena
        assert asked == ["probe", "load"]


def test_a_registration_that_hangs_is_a_slow_call() -> None:
    """Its end is seen, also if nothing else happens then."""

    class Registering(MemoryTier):
        looks = 0

        def register_memory(self, arena: Any) -> None:
            self.hook("register")

        def report(self) -> dict[str, Any]:
            self.looks += 1
            return {}

    gate = Gate("register")
    tier = Registering(gate)
    with rig(tier, slow_s=10.0) as made:
        made.submit(probe(0, 1))
        made.clock.now += 11
        assert not made.end(0).held.any()
        assert not made.ask(probe(1, 1)).held.any()
        assert made.reported(up=False, refused=2)
        seen = tier.looks
        assert eventually(lambda: tier.looks > seen + 1), "a look that finds nothing new"
        gate.open.set()
        assert made.reported(up=True)


def test_a_tier_that_cannot_register_serves_all_the_same() -> None:
    class Unable(MemoryTier):
        def register_memory(self, arena: Any) -> None:
            raise RuntimeError("no such device")

    with rig(Unable()) as made:
        made.ask(probe(0, 1))
        assert made.reported(up=True, errors=0)


def test_reports_carry_what_the_tier_tells_and_a_status_can_say() -> None:
    class Telling(MemoryTier):
        def report(self) -> dict[Any, Any]:
            odd = {"bad": object(), "huge": 1 << 70, "nan": float("nan"), 3: 4, "up": False}
            return {"records": 3, "indexing": False, "text": "fine", "odd": "\ud800", **odd}

    with rig(Telling()) as made:
        assert made.reported(records=3, indexing=False, text="fine", up=True)
        assert not {"bad", "huge", "nan", 3, "odd"} & set(made.reports[0])


def test_a_report_that_readers_of_a_status_cannot_use_is_left_out() -> None:
    amounts = {"bytes": 5, "reserved_bytes": 0}
    useless: list[dict[str, Any]] = [
        {"bytes": "many", "capacity_bytes": -1, "records": True, "tenants": 5},
        *({"tenants": bad} for bad in ({"a": 5}, {"a": {"bytes": 1}}, {"a": {**amounts, "x": {}}})),
        {"deep": {"a": {"b": {"c": 1}}}},
    ]
    for told in useless:
        assert reportable(told) == {}
    well = {"bytes": 5, "records": 2.0, "tenants": {"a": amounts | {"cap_bytes": 9}}, "deep": {}}
    assert reportable(well) == well
    assert len(reportable({f"field{i}": i for i in range(10_000)})) < 100


def test_close_refuses_waits_and_closes() -> None:
    gate = Gate("load")
    tier = MemoryTier(gate)
    made = Rig(tier)
    for op in range(6):
        made.submit(load(op, 1, op))
    for _ in range(4):
        assert gate.entered.acquire(timeout=WAIT_S)
    closing = threading.Thread(target=made.close, args=(WAIT_S,))
    closing.start()
    assert set(made.ends(2)) == {4, 5}
    assert not tier.closed
    gate.open.set()
    closing.join(WAIT_S)
    assert eventually(lambda: tier.closed)
    assert set(made.ends(4)) == {0, 1, 2, 3}
    assert not made.ask(probe(9, 1)).held.any()


def test_close_leaves_behind_what_hangs() -> None:
    gate = Gate("load")
    hung, well = MemoryTier(gate), MemoryTier()
    made = Rig(hung, well)
    made.submit(load(0, 1, 1))
    assert gate.entered.acquire(timeout=WAIT_S)
    assert not made.close(0.2)
    assert well.closed
    assert not hung.closed
    gate.open.set()
