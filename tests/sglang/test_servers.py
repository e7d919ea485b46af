"""Real SGLang servers on a CPU, two on one daemon: ``make test-sglang``."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from kvass._version import TESTED_SGLANG
from kvass.connectors.sglang.plugin import backend_config
from kvass.testing.daemon import Daemon, running_daemon
from tests.support.sglang.server import Server, environment, overlays
from tests.support.vllm.models import TINY, build

INSTALLED: Final = overlays()
VERSIONS: Final = os.environ.get("SGLANG_VERSIONS", "").split() or sorted(TESTED_SGLANG)
NEWEST: Final = VERSIONS[-1]
STORED_S: Final = 60.0
THRESHOLD: Final = {"prefetch_threshold": 64}
"""SGLang asks the storage for prompts of this many tokens or more."""

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(INSTALLED is None, reason="make test-sglang runs it"),
]


def prompt(seed: int, tokens: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(3, 1000) for _ in range(tokens)]


LONG, SHORT = prompt(1, 1500), prompt(2, 700)
BRANCH = LONG[:1000] + prompt(3, 300)
PROMPTS: Final = (LONG, SHORT, BRANCH)


@contextmanager
def servers(
    folder: Path,
    daemon: Daemon,
    version: str,
    *,
    page: int = 64,
    more: tuple[str, ...] = (),
    options: Mapping[str, Any] | None = None,
) -> Iterator[tuple[Server, Server]]:
    """Server ``a`` has kvass in its extra config, ``b`` by the variable. The weights of ``b`` are
    fixed, so its cache can be flushed."""
    model = build(folder.parent / "models", TINY)
    extra = backend_config() | {"kvass.socket": daemon.socket} | THRESHOLD | dict(options or {})
    threshold = ("--hicache-storage-backend-extra-config", '{"prefetch_threshold": 64}')
    env = {"KVASS": daemon.socket, "KVASS_FIXED_WEIGHTS": "yes"}
    with (
        Server(version, model, folder / "a.log", page=page, more=more, extra=extra) as a,
        Server(version, model, folder / "b.log", page=page, more=(*more, *threshold), env=env) as b,
    ):
        yield a.wait_ready(), b.wait_ready()


def rows(daemon: Daemon) -> int:
    namespaces = daemon.status()["namespaces"]
    return sum(int(group["rows"]) for namespace in namespaces for group in namespace["groups"])


def stored(daemon: Daemon, count: int) -> None:
    """Wait until the daemon has ``count`` rows."""
    deadline = time.monotonic() + STORED_S
    while rows(daemon) < count:
        assert time.monotonic() < deadline, f"{rows(daemon)} of {count} pages were stored"
        time.sleep(0.05)


def pages_of(page: int) -> int:
    """How many pages the prompts have together."""
    return len(LONG) // page + len(SHORT) // page + (len(BRANCH) // page - 1000 // page)


def check_sharing(daemon: Daemon, a: Server, b: Server, page: int, ranks: int = 1) -> list[Any]:
    """``b`` reads what ``a`` stored and gives the same tokens, which are returned."""
    computed = [a.generate(tokens) for tokens in PROMPTS]
    assert [answer.stored for answer in computed] == [0, 0, 0]
    stored(daemon, pages_of(page) * ranks)
    loaded = [b.generate(tokens) for tokens in PROMPTS]
    assert [answer.tokens for answer in loaded] == [answer.tokens for answer in computed]
    for tokens, answer in zip(PROMPTS, loaded, strict=True):
        assert answer.cached == (len(tokens) - 1) // page * page
    assert loaded[0].stored == loaded[0].cached
    assert loaded[1].stored == loaded[1].cached
    salted = b.generate(SHORT, extra_key="salt")
    assert (salted.stored, salted.tokens) == (0, loaded[1].tokens)
    return [answer.tokens for answer in computed]


@pytest.mark.parametrize("version", VERSIONS)
def test_two_servers_share_and_outlive_the_daemon(tmp_path: Path, version: str) -> None:
    with (
        running_daemon(tmp_path, lookup_budget_ms=10_000) as daemon,
        servers(tmp_path, daemon, version) as (a, b),
    ):
        tokens = check_sharing(daemon, a, b, 64)
        check_flush_and_new_weights(tmp_path, daemon, a)
        check_trouble(daemon, b, tokens)
        assert_quiet(a, b)


def check_flush_and_new_weights(folder: Path, daemon: Daemon, server: Server) -> None:
    """Tokens are those of the weights in memory."""
    old = server.generate(LONG).tokens
    server.flush()
    assert server.generate(LONG).stored == 0, "a flush may mean other weights"
    other = build(folder.parent / "models", TINY, seed=1)
    server.post("/update_weights_from_disk", {"model_path": str(other)})
    new = server.generate(LONG)
    assert new.stored == 0
    assert new.tokens != old
    daemon.kill()
    server.flush()
    assert server.generate(LONG).tokens == new.tokens, "computed without a cache"
    daemon.start()


def check_trouble(daemon: Daemon, server: Server, tokens: list[Any]) -> None:
    """Each request is answered with the right tokens, whatever the daemon does."""

    def right(name: str) -> int:
        server.flush()
        answer = server.generate(LONG)
        assert answer.tokens == tokens[0], name
        return answer.stored

    daemon.suspend()
    assert right("hangs") == 0
    daemon.resume()
    daemon.kill()
    assert right("killed") == 0
    daemon.start()
    deadline = time.monotonic() + STORED_S
    while right("back") == 0:
        assert time.monotonic() < deadline, "nothing was stored in the new daemon"


def assert_quiet(*all_servers: Server) -> None:
    """No call of the backend failed by a defect, and each flush was counted."""
    for server in all_servers:
        assert "cleared no host pool" not in server.text(), server.tail()
        assert "counts as a miss from here on" not in server.text(), server.tail()


# SGLang's attention for a CPU runs no MLA model; ``test_bytes_of_real_pools`` has its pool.
KINDS: Final[dict[str, dict[str, Any]]] = {
    "a token per page": {"page": 1},
    "layer_first": {"more": ("--hicache-mem-layout", "layer_first")},
    "host memory is a buffer": {"more": ("--hicache-host-memory-mode", "buffer_only")},
    "2 ranks": {"more": ("--tp-size", "2")},
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_pools(tmp_path: Path, kind: str) -> None:
    options = KINDS[kind]
    ranks = 2 if kind == "2 ranks" else 1
    with (
        running_daemon(tmp_path, lookup_budget_ms=10_000) as daemon,
        servers(tmp_path, daemon, NEWEST, **options) as (a, b),
    ):
        check_sharing(daemon, a, b, options.get("page", 64), ranks)
        b.flush()
        assert b.generate(SHORT).stored > 0
        a.flush()
        assert a.generate(SHORT).stored == 0
        assert "the cache was flushed, so" in a.text()
        assert_quiet(a, b)


def run_module(version: str, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a module of ``tests/support/sglang`` with SGLang until it has ended well."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.support.sglang.{name}", *words],
        env=environment(version),
        capture_output=True,
        text=True,
        timeout=480,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


POOLS: Final = (
    *("FULL page_first 16", "FULL page_first_direct 64", "FULL layer_first 1", "MLA page_first 16"),
    *("MLA layer_first 1", "FULL+SWA page_first_direct 16", "FULL+MAMBA page_first_direct 64"),
)


@pytest.mark.skipif(NEWEST < "0.5.23", reason="SGLang's fixtures are of 0.5.23")
@pytest.mark.parametrize("pools", POOLS)
def test_bytes_of_real_pools(tmp_path: Path, pools: str) -> None:
    with running_daemon(tmp_path, lookup_budget_ms=10_000) as daemon:
        done = run_module(NEWEST, "real_pools", daemon.socket, *pools.split())
    expected = ["kv", *(part.lower() for part in pools.split()[0].split("+")[1:])]
    assert [line.split()[0] for line in done.stdout.splitlines() if "equal" in line] == expected


def test_two_engines_of_one_process_never_share_weights_replaced_in_place(tmp_path: Path) -> None:
    """One after the other, each after one flush. The prompt is the same."""
    model, *weights = (str(build(tmp_path / "models", TINY, seed=seed)) for seed in (0, 1, 2))
    with running_daemon(tmp_path, lookup_budget_ms=10_000) as daemon:
        done = run_module(NEWEST, "two_engines", daemon.socket, model, *weights)
    first, second = (json.loads(line) for line in done.stdout.splitlines() if '"rows"' in line)
    pages = len(LONG) // 64
    assert (first["cached"], first["rows"]) == (0, pages)
    assert (second["cached"], second["rows"]) == (0, 2 * pages), "it read pages of other weights"
    assert second["logprobs"] != first["logprobs"]


def test_without_a_daemon_every_request_is_answered(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as daemon:
        daemon.kill()
        with servers(tmp_path, daemon, NEWEST) as (a, b):
            answers = [server.generate(LONG) for server in (a, b)]
            assert answers[0].tokens == answers[1].tokens
            daemon.start()
            assert b.generate(SHORT).tokens == a.generate(SHORT).tokens
            assert_quiet(a, b)


def test_a_wrong_option_leaves_the_server_running(tmp_path: Path) -> None:
    with (
        running_daemon(tmp_path) as daemon,
        servers(tmp_path, daemon, NEWEST, options={"kvass.sockets": "x"}) as (a, _),
    ):
        assert a.generate(SHORT).stored == 0
        lines = [line for line in a.text().splitlines() if "kvass is off" in line]
        assert len(lines) == 1
        assert "kvass.sockets" in lines[0]
