"""Real SGLang servers on a CPU whose caches are linked to one daemon: ``make test-sglang``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from kvass.testing.daemon import Daemon, running_daemon
from tests.sglang.test_servers import (
    NEWEST,
    SHORT,
    assert_quiet,
    check_flush_and_new_weights,
    check_sharing,
    check_trouble,
)
from tests.support.sglang.server import Server, overlays
from tests.support.vllm.models import TINY, build

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(overlays() is None, reason="make test-sglang runs it"),
    pytest.mark.skipif(NEWEST < "0.5.23", reason="0.5.23 is the first that loads other linkers"),
]


def flags(options: dict[str, object]) -> tuple[str, ...]:
    config = {
        "linker": "KvassLinker",
        "linker_module_path": "kvass.connectors.sglang.linker",
        "linker_extra_config": options,
    }
    return (
        *("--enable-unified-cache-external-linker", "--unified-cache-external-linker-backend"),
        *("dynamic", "--unified-cache-external-linker-config", json.dumps(config)),
    )


@contextmanager
def linked(
    folder: Path, daemon: Daemon, page: int = 64, more: tuple[str, ...] = ()
) -> Iterator[tuple[Server, Server]]:
    """Two servers. The weights of the second are fixed, so its cache can be flushed, and ``KVASS``
    tells it the socket."""
    model = build(folder.parent / "models", TINY)
    given = flags({"kvass.socket": daemon.socket})
    fixed, told = flags({"kvass.fixed_weights": True}), {"KVASS": daemon.socket}
    options: dict[str, Any] = {"page": page, "more": more}
    with (
        Server(NEWEST, model, folder / "a.log", **options, cache=given) as a,
        Server(NEWEST, model, folder / "b.log", **options, cache=fixed, env=told) as b,
    ):
        yield a.wait_ready(), b.wait_ready()
        assert "has no effect" not in b.text()


def test_two_linked_servers_share_and_outlive_the_daemon(tmp_path: Path) -> None:
    with (
        running_daemon(tmp_path, lookup_budget_ms=10_000) as daemon,
        linked(tmp_path, daemon) as (a, b),
    ):
        tokens = check_sharing(daemon, a, b, 64)
        check_flush_and_new_weights(tmp_path, daemon, a)
        check_trouble(daemon, b, tokens)
        assert_quiet(a, b)


# SGLang's attention for a CPU runs no MLA model.
KINDS: Final[dict[str, dict[str, Any]]] = {
    "a token per page": {"page": 1},
    "2 ranks": {"more": ("--tp-size", "2")},
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_linked_pools(tmp_path: Path, kind: str) -> None:
    options = KINDS[kind]
    with (
        running_daemon(tmp_path, lookup_budget_ms=10_000) as daemon,
        linked(tmp_path, daemon, **options) as (a, b),
    ):
        check_sharing(daemon, a, b, options.get("page", 64), 2 if kind == "2 ranks" else 1)
        b.flush()
        assert b.generate(SHORT).stored > 0
        a.flush()
        assert a.generate(SHORT).stored == 0
        assert_quiet(a, b)
