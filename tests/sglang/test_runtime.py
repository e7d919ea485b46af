"""Real SGLang servers whose storage backend is attached and detached at run time, or is made to
fail by SGLang's own injector of failures."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from kvass.connectors.sglang.plugin import backend_config
from kvass.testing.daemon import Daemon, running_daemon
from tests.sglang.test_servers import INSTALLED, LONG, NEWEST, SHORT, THRESHOLD, rows, stored
from tests.support.sglang.server import ANSWER_S, Server
from tests.support.vllm.models import TINY, build

KEY: Final = "key"
PATH: Final = "/hicache/storage-backend"

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(INSTALLED is None, reason="make test-sglang runs it"),
]


def extra(daemon: Daemon) -> dict[str, Any]:
    """The weights are never replaced, so a flush of the server's cache changes nothing."""
    fixed = {"kvass.socket": daemon.socket, "kvass.fixed_weights": True}
    return backend_config() | fixed | THRESHOLD


def admin(server: Server, method: str, body: Mapping[str, Any] | None = None) -> tuple[int, str]:
    """The status and the text of SGLang's answer about its storage backend."""
    data = json.dumps(body).encode() if body is not None else None
    url = f"http://127.0.0.1:{server.port}{PATH}"
    request = urllib.request.Request(url, data, server.headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:
            return int(reply.status), reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def attach(server: Server, daemon: Daemon, policy: str = "wait_complete") -> int:
    body = {
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config_json": json.dumps(extra(daemon)),
        "hicache_storage_prefetch_policy": policy,
        "hicache_write_policy": "write_through",
    }
    return admin(server, "PUT", body)[0]


def comes_back(server: Server, daemon: Daemon, tokens: list[int], right: list[int]) -> None:
    """What the server stores is read after a flush, with the same tokens."""
    before = rows(daemon)
    assert server.generate(tokens).tokens == right
    stored(daemon, before + len(tokens) // 64)
    server.flush()
    again = server.generate(tokens)
    assert again.stored == (len(tokens) - 1) // 64 * 64
    assert again.tokens == right


def test_a_backend_is_attached_and_detached_at_run_time(tmp_path: Path) -> None:
    model = build(tmp_path.parent / "models", TINY)
    more = ("--admin-api-key", KEY)
    with (
        running_daemon(tmp_path, lookup_budget_ms=10_000) as daemon,
        Server(NEWEST, model, tmp_path / "server.log", more=more) as server,
    ):
        server.wait_ready().headers["authorization"] = f"Bearer {KEY}"
        assert admin(server, "DELETE")[0] == 200, "there is none"
        assert attach(server, daemon, "no_policy") == 400
        right = server.generate(LONG).tokens
        short = server.generate(SHORT).tokens
        server.flush()
        assert rows(daemon) == 0
        assert attach(server, daemon) == 200
        assert json.loads(admin(server, "GET")[1])["hicache_storage_backend"] == "dynamic"
        comes_back(server, daemon, LONG, right)
        assert attach(server, daemon, "timeout") == 200, "the policy alone is changed"
        other = {"hicache_storage_backend": "file", "hicache_write_policy": "write_through"}
        assert admin(server, "PUT", other)[0] != 200, "there is one"
        assert [admin(server, "DELETE")[0] for _ in range(2)] == [200, 200]
        server.flush()
        before = rows(daemon)
        detached = server.generate(LONG)
        assert (detached.stored, detached.tokens) == (0, right)
        assert rows(daemon) == before
        server.flush()
        assert attach(server, daemon) == 200
        assert server.generate(LONG).stored > 0, "what it stored before"
        comes_back(server, daemon, SHORT, short)
        assert "counts as a miss from here on" not in server.text()


@pytest.mark.skipif(NEWEST < "0.5.23", reason="SGLang's injector is of 0.5.23")
def test_calls_that_fail_or_wait_at_random_give_the_right_tokens(tmp_path: Path) -> None:
    """SGLang wraps the backend: a call fails with a probability, or waits before it is made."""
    model = build(tmp_path.parent / "models", TINY)
    env = {
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.3",
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.05",
    }
    prompts = [LONG[: 300 + 100 * number] for number in range(5)]
    with (
        running_daemon(tmp_path, lookup_budget_ms=10_000) as daemon,
        Server(NEWEST, model, tmp_path / "a.log", extra=extra(daemon), env=env) as server,
    ):
        server.wait_ready()
        right: dict[int, list[int]] = {}
        found = []
        for number in range(40):
            tokens = prompts[number % len(prompts)]
            server.flush()
            answer = server.generate(tokens)
            assert answer.tokens == right.setdefault(len(tokens), answer.tokens), number
            found.append((answer.stored, (len(tokens) - 1) // 64 * 64))
        assert "test injector enabled" in server.text()
        assert any(0 < got == most for got, most in found), found
        assert any(got < most for got, most in found[len(prompts) :]), "it failed no call"
        assert "counts as a miss from here on" not in server.text()
