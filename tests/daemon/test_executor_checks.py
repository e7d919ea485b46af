"""The executor has a tier prove its store, and takes a refusal for what it is."""

from __future__ import annotations

import logging

import pytest

from kvass.core.effects import TierClear, TierEpoch
from kvass.core.tiers.epochs import LOOK_AGAIN_S
from kvass.daemon.tier_process.executor import CHECK_S, FIRST_PAUSE_S, Executor
from kvass.errors import ItemRefused, TierDown
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


class ProvingTier(MemoryTier):
    """``checks``: the checks so far, whether each was with a write. ``stranger``: what is wrong
    with who answers. ``writes``: whether it may be written to."""

    def __init__(self, trouble: Trouble | Gate | None = None) -> None:
        super().__init__(trouble or Trouble(None))
        self.checks: list[bool] = []
        self.stranger = ""
        self.writes = True
        self.records[key(1)] = [b"\1" * PAGE, b"\2" * PAGE]

    def check_store(self, whole: bool) -> bool:
        self.hook("check")
        self.checks.append(whole)
        if self.stranger:
            raise TierDown(self.stranger)
        return whole and self.writes


def served(made: Rig, op: int) -> list[bool]:
    """Whether a probe, a load and a store are served. They use three operations."""
    probed = made.ask(probe(op, 1)).held.all()
    loaded = made.ask(load(op + 1, 1, 4)).which.all()
    stored = not made.ask(store(op + 2, 2, 2)).down
    return [bool(probed), bool(loaded), stored]


def later(made: Rig, tier: ProvingTier, seconds: float) -> None:
    """Let time pass until the next check of the store has ended."""
    before = len(tier.checks)
    made.clock.now += seconds
    assert eventually(lambda: len(tier.checks) > before)


def looks_of(executor: Executor) -> list[float]:
    """When the executor looks whether a check is due, from now on. It begins a check before it
    looks again."""
    looks, look = list[float](), executor._check_due

    def looked(now: float) -> bool:
        looks.append(now)
        return look(now)

    executor._check_due = looked  # type: ignore[method-assign]
    return looks


def test_a_stranger_is_noticed_although_every_call_of_the_tier_succeeds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A page that a web server serves as a file: its HEAD and its PUT are those of a store."""
    caplog.set_level(logging.INFO, "kvass")
    tier = ProvingTier()
    with rig(tier) as made:
        assert made.executors[0].check()
        assert eventually(lambda: tier.checks == [True]), "with a write at the start"
        assert served(made, 0) == [True, True, True]
        tier.stranger = "a page"
        later(made, tier, CHECK_S)
        assert tier.checks == [True, False]
        assert made.reported(up=False, trouble="a page")
        assert served(made, 10) == [False, False, False]
        later(made, tier, FIRST_PAUSE_S)
        tier.stranger = ""
        later(made, tier, 2 * FIRST_PAUSE_S)
        assert set(tier.checks[2:]) == {True}, "with a write after an error"
        assert made.reported(up=True)
        assert served(made, 20) == [True, True, True]
    told = [r.message for r in caplog.records]
    assert told == ["tier tier0 is down: a page", "tier tier0 is back"]


def test_a_kind_of_work_that_failed_is_tried_again_only_at_the_store_itself() -> None:
    trouble = Trouble(TierDown("gone"), "load")
    tier = ProvingTier(trouble)
    with rig(tier) as made:
        assert served(made, 0) == [True, False, True]
        trouble.error, tier.stranger = None, "a page"
        made.clock.now += FIRST_PAUSE_S
        assert not made.ask(load(10, 1, 4)).which.any()
        assert (trouble.calls, tier.checks) == (1, [True])
        assert served(made, 20) == [False, False, False], "nor is anything else asked of a page"
        tier.stranger = ""
        later(made, tier, 4 * FIRST_PAUSE_S)
        assert eventually(lambda: served(made, 30)[0])
        assert served(made, 40) == [True, True, True]
        assert made.reported(up=True)


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("kind", ["probe", "load", "store"])
def test_trouble_that_nobody_asks_about_ends_with_a_check(kind: str, writes: bool) -> None:
    """The engine has left, or its rows have: what failed last would be told for ever."""
    trouble = Trouble(TierDown("gone"), kind)
    tier = ProvingTier(trouble)
    with rig(tier) as made:
        assert served(made, 0)[2] == (kind == "load"), "a store probes first"
        trouble.error, tier.writes = None, writes
        later(made, tier, CHECK_S)
        assert made.reported(up=False, trouble="gone"), "somebody may still try again"
        later(made, tier, CHECK_S)
        assert tier.checks == [False, True]
        assert eventually(lambda: not made.executors[0]._left_alone(made.clock.now)), "it has ended"
        read_only = kind != "load" and not writes
        assert made.reported(up=not read_only, trouble="gone" if read_only else "")
        later(made, tier, CHECK_S)
        assert tier.checks[2:] == [False], "a store that takes no writes is not asked each time"
        assert served(made, 10) == [True, True, True]
        assert made.reported(up=True, trouble="")


def test_a_check_that_takes_long_is_overdue_and_is_not_asked_for_twice() -> None:
    gate = Gate("check")
    tier = ProvingTier(gate)
    with rig(tier, slow_s=30.0) as made:
        made.clock.now += CHECK_S
        assert gate.entered.acquire(timeout=WAIT_S)
        looks = looks_of(made.executors[0])
        for _ in range(4):
            made.clock.now += CHECK_S
            assert eventually(lambda: looks.count(made.clock.now) > 1)
            assert len(made.executors[0]._works["check"].queue) == 1
            assert served(made, 0) == [True, True, True], "as long as it may be well"
        made.clock.now += 30.0
        assert made.reported(up=False, trouble="a call has been running for more than 30 s")
        assert served(made, 10) == [False, False, False]
        gate.open.set()
        assert made.reported(up=True)
        assert served(made, 20) == [True, True, True]


def test_a_refusal_of_one_request_is_its_end_and_no_trouble_of_the_tier() -> None:
    trouble = Trouble(ItemRefused("not this one"), "clear", "note")
    tier = ProvingTier(trouble)
    with rig(tier) as made:
        cleared = made.ask(TierClear(0, 1))
        assert (cleared.done, cleared.why) == (False, "not this one")
        assert made.ask(TierEpoch(0, 2, SPACE, fresh=1)).epoch is None
        assert served(made, 10) == [True, True, True]
        why = "an epoch cannot be noted: not this one"
        assert made.reported(up=True, trouble=why, errors=2, refused=0)
        trouble.error = None
        assert made.ask(TierEpoch(0, 20, SPACE, fresh=1)).epoch is not None
        assert made.reported(up=True, trouble="", errors=2, refused=0)


def test_an_epoch_that_nobody_asks_for_any_more_is_no_trouble() -> None:
    tier = ProvingTier(Trouble(ItemRefused("read-only"), "set_note"))
    with rig(tier) as made:
        for _ in range(2):
            assert made.ask(TierEpoch(0, 1, SPACE, fresh=1)).epoch is None
            made.clock.now += LOOK_AGAIN_S
            assert made.reported(trouble="an epoch cannot be noted: read-only")
        made.clock.now += LOOK_AGAIN_S
        assert made.reported(up=True, trouble="")


def test_a_refusal_that_ends_a_batch_is_trouble() -> None:
    """Such as that of a note that must be set first: rows would queue, and nobody would know."""
    tier = ProvingTier(Trouble(ItemRefused("not this one"), "store"))
    with rig(tier) as made:
        assert served(made, 0) == [True, True, False]
        assert made.reported(up=False, trouble="not this one")


def test_a_clear_that_is_not_begun_says_why_the_tier_is_down() -> None:
    tier = ProvingTier(Trouble(TierDown("read-only"), "store"))
    with rig(tier) as made:
        assert served(made, 0) == [True, True, False]
        cleared = made.ask(TierClear(0, 5))
        assert (cleared.done, cleared.why) == (False, "read-only")


def test_a_tier_without_a_check_is_not_asked_for_one() -> None:
    trouble = Trouble(TierDown("gone"))
    with rig(MemoryTier(trouble)) as made:
        assert not made.executors[0].check()
        assert not made.ask(probe(0, 1)).held.any()
        trouble.error = None
        made.clock.now += 2 * CHECK_S
        made.ask(probe(1, 1))
        assert made.reported(up=True, errors=1)
