"""KV events of rows in a tier, as Dynamo's own indexer takes them: it claims none that is gone.

As ``test_dynamo.py``, with a disk tier that holds more than L1, and drops the oldest.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from kvass import Client
from kvass.connectors.vllm.events import Kept, VllmEvents
from kvass.engine import tier_rows
from kvass.engine.tier_rows import TierRows
from kvass.testing.daemon import Daemon, running_daemon
from tests.engine.test_dynamo import Engine, indexer
from tests.engine.test_scheduler_events import ROW, churn
from tests.support.servers.routers import Claim, DynamoIndexer
from tests.support.vllm.ranks import making, until
from tests.support.vllm.scheduler import BLOCK

__all__ = ["indexer"]


class TierEngine(Engine):
    """An engine that announces rows in tiers."""

    def bounds(self, tokens: list[int]) -> tuple[int, int]:
        """How many tokens of a prompt the indexer must claim at least, and may claim at most: with
        rows that are in the tier and not in L1, and with all that any store has."""
        hashes = self.world._hasher(Request("look", tokens, SamplingParams(), None))
        claim = self._truth(tokens)
        own, with_l1 = claim.gpu // BLOCK, claim.cpu // BLOCK
        l1, any_of = self.present(hashes, False), self.present(hashes, True)
        tier_only = [has and not in_l1 for has, in_l1 in zip(any_of, l1, strict=True)]
        least = [*([True] * with_l1), *tier_only[with_l1:], False].index(False)
        most = [*([True] * own), *any_of[own:], False].index(False)
        return least * BLOCK, most * BLOCK

    def settle_tiers(self, prompts: list[list[int]], what: str) -> list[Claim]:
        """Step until the indexer claims what is there; its claims."""

        def right() -> bool:
            claims = self.claims(prompts)
            limits = [self.bounds(tokens) for tokens in prompts]
            pairs = zip(claims, self.truth(prompts), limits, strict=True)
            return all(
                claim[:2] == true[:2] and least <= claim.disk <= most
                for claim, true, (least, most) in pairs
            )

        until(lambda: self.step() and right(), what)
        return self.claims(prompts)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """With room for 32 rows in L1, and for more in a tier."""
    folder = tmp_path / "tier"
    folder.mkdir()
    tier = f"disk:{folder}?capacity=2MiB"
    options: dict[str, Any] = {"l1_size": str(64 * ROW), "lookup_budget_ms": 10_000}
    with running_daemon(tmp_path, tier=[tier], **options) as one:
        yield one


@pytest.fixture
def a(
    daemon: Daemon, indexer: DynamoIndexer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[TierEngine]:
    monkeypatch.setattr(tier_rows, "PAUSE_S", 0.005)
    monkeypatch.setattr(tier_rows, "NEW_DAEMON_S", 0.5)
    with making(partial(TierEngine, daemon, indexer)) as make:
        yield make(more={"kvass.tier_events": 0.05}, blocks=40)


def empty(daemon: Daemon) -> None:
    """The tier drops all that it has."""
    with Client(daemon.socket) as client:
        client.empty_tier(daemon.status()["tiers"][0]["name"])


def tiers_of(one: TierEngine) -> TierRows:
    events = one.world.connector._planner.events
    assert events is not None
    assert isinstance(events._tiers, TierRows)
    return events._tiers


def test_random_things_leave_no_claim_of_what_is_gone(a: TierEngine, daemon: Daemon) -> None:
    rng, prompts, storage = random.Random(1), list[list[int]](), 0

    def clear() -> None:
        with Client(daemon.socket) as client:
            client.clear(everything=True)

    def restart() -> None:
        daemon.restart()
        a.wait_connected()

    rare: list[Callable[[], None]] = [partial(empty, daemon), clear, restart]
    for turn in range(9):
        first = rng.randrange(200)
        prompts += churn(a, range(first, first + 12))
        if turn % 3 == 2:
            rare[turn // 3]()
        claims = a.settle_tiers(prompts[-40:], f"turn {turn}")
        storage += sum(claim.disk - claim.cpu for claim in claims)
    assert storage > 100


def test_a_row_that_the_tier_dropped_is_seen_if_nobody_tells_it(
    a: TierEngine, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above."""
    real, rows = VllmEvents.removed, tiers_of(a)._announced

    def untold(self: VllmEvents, group: int, rows: list[Kept], tier: bool) -> Any:
        return real(self, group, [] if tier else rows, tier)

    prompts = churn(a, range(40))
    a.settle_tiers(prompts, "rows left L1")
    assert rows
    monkeypatch.setattr(VllmEvents, "removed", untold)
    empty(daemon)
    until(lambda: a.step() and not rows, "they are asked for again")
    pairs = zip(a.claims(prompts), [a.bounds(tokens) for tokens in prompts], strict=True)
    assert any(claim.disk > most for claim, (_, most) in pairs)
