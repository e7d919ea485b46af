"""Hints over real HTTP to a real server: what L1 holds afterwards, and what is counted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from examples import agent_loop, serving
from examples.tiny import some_prompt, transfer_config
from kvass.testing.daemon import Daemon, running_daemon
from tests.support.vllm.http_server import forked
from tests.support.waiting import eventually

pytestmark = pytest.mark.engine

L1 = 12 << 20
CHUNK = 256
FIGURES = ("lookups", "lookup_tokens", "hit_tokens")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, str]]:
    """A daemon with a small L1, and a server whose own cache is smaller than L1."""
    folder = tmp_path_factory.mktemp("hints")
    more = {"num_gpu_blocks_override": 136}
    with (
        running_daemon(folder, l1_size=str(L1), lookup_budget_ms=10_000) as daemon,
        mock.patch.object(serving, "_process", forked),
        serving.servers(folder, daemon, [transfer_config(daemon.socket)], more) as (url,),
    ):
        yield daemon, url


def ask(
    url: str,
    prompt: list[int],
    session: str = "",
    named: Mapping[str, str] | None = None,
    header: str = "",
    **hints: Any,
) -> dict[str, Any]:
    """What kvass did for a prompt. ``named``: more fields of the body. ``header``: its id."""
    vllms = {name: hints.pop(name) for name in ("max_offload_tokens",) if name in hints}
    params = {f"kvass.{name}": value for name, value in {**hints, "report": True}.items()} | vllms
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "kv_transfer_params": params}
    body |= {"session_id": session} if session else {}
    body |= named or {}
    headers = {"X-Request-Id": header} if header else {}
    where = f"{url}/v1/completions"
    reply = httpx.post(where, json=body, headers=headers, timeout=100, trust_env=False)
    did: dict[str, Any] = reply.raise_for_status().json()["kv_transfer_params"]["kvass"]
    return did


def counters(daemon: Daemon) -> dict[str, int]:
    found: dict[str, int] = daemon.status()["counters"]
    return found


def push(daemon: Daemon, url: str, size: int, seed: int) -> None:
    """Store other prompts of ``size`` bytes."""
    until = daemon.status()["counters"]["l1_in_bytes"] + size
    while daemon.status()["counters"]["l1_in_bytes"] < until:
        seed += 1
        ask(url, some_prompt(1000, seed=seed))


def test_a_retained_prompt_stays_under_pressure_and_another_does_not(
    served: tuple[Daemon, str],
) -> None:
    daemon, url = served
    kept, other = (some_prompt(512, seed=seed) for seed in (7000, 7001))
    ask(url, kept, ttl="1h")
    ask(url, other)
    assert eventually(lambda: daemon.status()["l1_kept_bytes"] > 0)
    push(daemon, url, 2 * L1, 8000)
    assert ask(url, other)["hit_tokens"] == 0, "the control"
    did = ask(url, kept, ttl="1h", max_load_tokens=300)
    assert (did["hit_tokens"], did["missed_because"]) == (288, "load_limit")
    assert did["kept_tokens"] >= 256
    assert daemon.status()["l1_kept_bytes"] <= L1 // 4
    assert counters(daemon)["evicted_kept"] == 0


def test_the_rows_of_a_session_that_ended_are_the_next_to_go(served: tuple[Daemon, str]) -> None:
    """Five turns, the last of which says that it is over. What was older stays."""
    daemon, url = served
    push(daemon, url, L1, 9000)
    older = some_prompt(1000, seed=9998)
    ask(url, older)
    before = counters(daemon)
    turns = list(agent_loop.play(url, some_prompt(256, seed=1), "agent", seed=2))
    assert len(turns) == agent_loop.TURNS
    assert eventually(lambda: counters(daemon)["sessions_ended"] == before["sessions_ended"] + 1)
    ended = counters(daemon)["session_rows_ended"] - before["session_rows_ended"]
    assert ended >= 3, "more than 256 + 5 * 132 tokens, in chunks of 256"
    evicted = counters(daemon)["evicted_ended"]
    ask(url, some_prompt(1000, seed=9999))  # 4 rows: tails that were replaced left 2 free at most
    assert eventually(lambda: counters(daemon)["evicted_ended"] > evicted), "they go first"


def engine_figures(url: str) -> list[float]:
    """``FIGURES`` in the engine's own metrics."""
    page = httpx.get(f"{url}/metrics", timeout=100, trust_env=False).raise_for_status().text
    families = text_string_to_metric_families(page)
    seen = {s.name: s.value for family in families for s in family.samples}
    return [seen.get(f"vllm:kvass_{name}_total", 0.0) for name in FIGURES]


def daemon_figures(daemon: Daemon) -> list[float]:
    (ns,) = daemon.status()["namespaces"]
    return [ns[name] for name in FIGURES]


def test_the_daemon_counts_what_the_engine_counts(served: tuple[Daemon, str]) -> None:
    """To the token: 20 prompts at once, and blocks for seven. L1 has a chunk of each of eight, the
    engine's cache has none. They store nothing themselves, so that what is stored stays."""
    daemon, url = served
    prompts = [some_prompt(600, seed=6000 + number) for number in range(20)]
    stored = prompts[:16:2]
    for tokens in stored:
        ask(url, tokens[: CHUNK + 8])
    for number in range(8):
        ask(url, some_prompt(600, seed=6100 + number), max_offload_tokens=0)
    before = daemon_figures(daemon)
    with ThreadPoolExecutor(20) as pool:
        did = [*pool.map(partial(ask, url, max_offload_tokens=0), prompts)]
    assert eventually(lambda: daemon_figures(daemon) == engine_figures(url)), "its only engine"
    now = daemon_figures(daemon)
    assert 10 <= now[0] - before[0] <= 20, "its own cache may have some"
    assert now[1] - before[1] <= 20 * 576
    assert now[2] - before[2] == sum(one["hit_tokens"] for one in did) >= len(stored) * CHUNK


def stored_tokens(daemon: Daemon) -> int:
    (ns,) = daemon.status()["namespaces"]
    return int(ns["stored_tokens"])


def test_a_requests_id_of_any_length_costs_no_request_its_store(
    served: tuple[Daemon, str],
) -> None:
    """Six others while it runs, for 64 tokens."""
    daemon, url = served
    before = counters(daemon)
    names: list[dict[str, Any]] = [
        *({"named": {"request_id": "x" * size, "max_tokens": 64}} for size in (600, 100_000)),
        {"header": "y" * 5_000},
        {"named": {"request_id": "\u4e2d\n\U0001f600" * 400}},
    ]
    for number, name in enumerate(names):
        stored = stored_tokens(daemon)
        prompts = [some_prompt(257, seed=9_500 + 7 * number + i) for i in range(7)]
        with ThreadPoolExecutor(1) as pool:  # L1 is small: one engine may write three rows at once
            running = pool.submit(ask, url, prompts[0], **name)
            for count, other in enumerate(prompts[1:], 1):
                ask(url, other)
                least = stored + count * CHUNK
                assert eventually(lambda: stored_tokens(daemon) >= least), f"{number}: {count}"  # noqa: B023
            assert running.result()["hit_tokens"] == 0
        due = stored + 7 * CHUNK
        assert eventually(lambda: stored_tokens(daemon) == due), f"name {number}"  # noqa: B023
    now = counters(daemon)
    changed = {name for name in now if now[name] != before.get(name, 0)}
    assert not [name for name in changed if name.startswith(("refused_", "sessions_lost"))]
    (log,) = Path(daemon.socket).parent.glob("vllm*.log")
    said = log.read_text()
    assert "the daemon refused" not in said
    assert "connection lost" not in said
