"""The tenant of a request of vLLM reaches the daemon."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvass.testing.daemon import Daemon
from kvass.types import is_tenant_name
from tests.engine.conftest import CHUNK
from tests.support.vllm.process import EngineProcess
from tests.support.vllm.scheduler import rig

SALTED = "salt-2bb80d537b1da3e3"
"""Of the salt "secret": the first 16 digits of its SHA-256."""


@pytest.mark.parametrize(
    ("params", "salt", "tenant"),
    [
        ({"kvass.tenant": "team-a"}, None, "team-a"),
        ({"kvass.tenant": "team-a"}, "secret", "team-a"),
        (None, "secret", SALTED),
        ({"other": "x"}, "secret", SALTED),
        ({"kvass.tenant": 7}, None, ""),
        ({"kvass.tenant": "x" * 100_000}, None, "other"),
        ({"kvass.tenant": "no spaces"}, "secret", "other"),
        (None, None, ""),
    ],
)
def test_whose_a_request_is(params: dict[str, Any] | None, salt: str | None, tenant: str) -> None:
    """Through vLLM's real scheduler."""
    client, world = rig()
    world.tolerant = True  # of a bad value
    world.add("a", range(100), max_tokens=1, params=params, salt=salt)
    world.run(client)
    assert [context.tenant for context in client.contexts.values()] == [tenant]
    assert {item.tenant for items in client.reserves for item in items} == {tenant}
    assert not tenant or is_tenant_name(tenant)


@pytest.mark.engine
def test_a_real_engines_requests_are_their_tenants(
    a: EngineProcess, daemon: Daemon, prompt: Callable[[int], list[int]]
) -> None:
    def lookups() -> dict[str, int]:
        return {t["tenant"]: t["lookups"] for t in daemon.status()["tenants"]}

    before, tokens = lookups(), prompt(CHUNK + 1)
    a.one(tokens, 1, params={"kvass.tenant": "team-real"})
    a.one(prompt(CHUNK + 1), 1, salt="secret")
    after = lookups()
    assert (after["team-real"], after[SALTED]) == (1, 1)
    assert after["default"] == before["default"]
    a.one(prompt(CHUNK + 1), 1)
    assert lookups()["default"] == before["default"] + 1, "the control names no tenant"
