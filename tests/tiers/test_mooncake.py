"""The Mooncake tier against a real master and real owners: shared, dead, slow, full, damaged."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import ClassVar

import pytest

from kvass.testing import TierSuite
from kvass.testing.mooncake_server import MooncakeServer
from kvass.testing.tier_suite import MakeTier
from kvass.tiers import open_tier
from tests.tiers.records import keys_of

numbers = count()
KEYS = keys_of(10)


@pytest.fixture(scope="module")
def server() -> Iterator[MooncakeServer]:
    made = MooncakeServer()
    yield made
    made.close()


class TestPureClient(TierSuite):
    @pytest.fixture
    def make_tier(self, server: MooncakeServer) -> MakeTier:
        url = f"mooncake:{server.address}?prefix=test{next(numbers)}:"
        return lambda: open_tier(url)


class TestOwner(TierSuite):
    """Its own memory holds what it stores, and goes with it."""

    persistent: ClassVar[bool] = False

    @pytest.fixture(scope="class")
    def bare(self) -> Iterator[MooncakeServer]:
        made = MooncakeServer(owners=0)
        yield made
        made.close()

    @pytest.fixture
    def make_tier(self, bare: MooncakeServer) -> MakeTier:
        url = f"mooncake:{bare.address}?prefix=test{next(numbers)}:&segment=512MiB"
        return lambda: open_tier(url)
