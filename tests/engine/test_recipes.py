"""The recipes of docs/recipes.md, run as a user runs them."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest

from examples import disaggregated_prefill, serving, two_replicas
from examples.proxy import for_one_token
from examples.serving import ask, running_proxy, two_servers
from examples.tiny import some_prompt, whole_blocks
from kvass.testing.daemon import Daemon, running_daemon
from tests.support.servers.routers import VllmRouter
from tests.support.vllm.http_server import API_SERVER, forked
from tests.support.vllm.process import EngineProcess
from tests.support.waiting import eventually

pytestmark = pytest.mark.engine

SHOWN = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text().splitlines()
"""The lines of the page, with what the recipes print."""
GONE = "http://127.0.0.1:9"
AS_A_USER = serving._process


def in_forks(command: list[str], *args: Any) -> AbstractContextManager[None]:
    """Servers, which start more quickly so; not the proxy."""
    return (forked if command[0] == API_SERVER else AS_A_USER)(command, *args)


def one_in_forks(command: list[str], *args: Any) -> AbstractContextManager[None]:
    """The server that has a flag; the other one as a user starts it."""
    return (forked if "--kv-transfer-config" in command else AS_A_USER)(command, *args)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the servers' logs."""
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="module", autouse=True)
def starting(folder: Path) -> Iterator[Future[list[str]]]:
    """Two servers that start in forks while tests without servers run."""
    with (
        mock.patch.object(serving, "_process", in_forks),
        ThreadPoolExecutor(1) as thread,
        ExitStack() as stack,
    ):
        both = two_servers(folder, lookup_budget_ms=10_000)  # patient, as below
        urls = thread.submit(stack.enter_context, both)
        yield urls
        urls.result()


@pytest.fixture
def servers(starting: Future[list[str]]) -> list[str]:
    return starting.result()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """Patient: a busy machine makes no miss of a hit."""
    with running_daemon(tmp_path, l1_size="256MiB", lookup_budget_ms=10_000) as one:
        yield one


def test_a_later_job_loads_the_prefix_of_an_earlier_one(daemon: Daemon) -> None:
    """On a busy machine a process's first lookup may time out, so more than one job may follow."""
    shown, whole = [line for line in SHOWN if line.startswith("job ")], [whole_blocks(2001)] * 8
    assert cached_each(shown[0]) == [0, *whole[1:]]
    assert cached_each(shown[1]) == whole
    assert sorted(cached_of_job(1, daemon)) == cached_each(shown[0])
    assert any(cached_of_job(later, daemon) == whole for later in (2, 3, 4))


def cached_of_job(job: int, daemon: Daemon) -> list[int]:
    return cached_each(run("offline_batch", daemon, "--questions", str(job))[1])


def cached_each(output: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", output.partition("each request:")[2])]


def test_no_policy_of_a_training_loop_reuses_what_another_one_computed(daemon: Daemon) -> None:
    status, output = run("rl_loop", daemon)
    assert status == 0, output
    *reset, unreset = lines = [line for line in output.splitlines() if line.startswith("policy")]
    assert len(reset) == 4
    assert all(
        line.endswith(": 0 prompt tokens cached, same tokens as computed: yes") for line in reset
    )
    assert unreset.endswith("NO")  # the control
    assert lines == [line for line in SHOWN if line.startswith("policy")]
    assert daemon.status()["rows"] > 0  # there was something to reuse


def test_the_second_replica_hits_what_the_first_one_computed(
    servers: list[str], tmp_path: Path
) -> None:
    first, second = two_replicas.play(tmp_path, servers, some_prompt(1000, seed=0))
    assert [first.server, second.server] == servers
    assert [first.cached, second.cached] == [0, whole_blocks(1000)]
    assert first.tokens == second.tokens


@pytest.mark.slow  # three processes that import vLLM
def test_a_server_that_a_user_starts_hits_what_another_one_computed(tmp_path: Path) -> None:
    """The seeds of Python's ``hash()`` differ, too."""
    with (
        mock.patch.object(serving, "_process", one_in_forks),
        two_servers(tmp_path, lookup_budget_ms=10_000) as urls,
    ):
        first, second = two_replicas.play(tmp_path, urls, some_prompt(1000, seed=0))
    assert [first.cached, second.cached] == [0, whole_blocks(1000)]
    assert first.tokens == second.tokens


def test_behind_vllms_router_the_next_server_hits_what_the_first_one_computed(
    servers: list[str],
) -> None:
    """In vLLM's own figures, too. The router sends requests to the servers in turn."""
    prompt, whole = some_prompt(1000, seed=40), whole_blocks(1000)
    before = [sources(url) for url in servers]
    with closing(VllmRouter(servers)) as router:
        first, second = [ask(router.url, prompt) for _ in servers]
    assert first.tokens == second.tokens
    assert [first.cached, second.cached] == [0, whole]

    def since() -> list[Counter[str]]:
        now = [sources(url) - former for url, former in zip(servers, before, strict=True)]
        return sorted(now, key=lambda had: had["external_kv_transfer"])

    computed, loaded = {"local_compute": 1000}, {"external_kv_transfer": whole}
    assert eventually(lambda: since() == [computed, {"local_compute": 1000 - whole, **loaded}])


def sources(url: str) -> Counter[str]:
    """How many tokens of prompts a server has had in all, by where it had them from."""
    page = httpx.get(f"{url}/metrics", trust_env=False).raise_for_status().text
    lines = re.findall(r'(?m)^vllm:prompt_tokens_by_source_total.*source="(\w+)"} (\S+)', page)
    return Counter({source: int(float(tokens)) for source, tokens in lines})


def test_a_server_tells_a_client_that_asks_what_kvass_did(servers: list[str]) -> None:
    prompt = some_prompt(1000, seed=30)
    told = [told_by(url, prompt, {"kvass.report": True}) for url in servers]
    assert told == [
        {"kvass": {"hit_tokens": 0, "kept_tokens": 0, "missed_because": "not_found"}},
        {"kvass": {"hit_tokens": whole_blocks(1000), "kept_tokens": 0, "missed_because": ""}},
    ]
    assert told_by(servers[0], prompt, {}) is None


def told_by(url: str, prompt: list[int], params: dict[str, Any]) -> Any:
    """``kv_transfer_params`` of the answer to a prompt that has ``params``."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "kv_transfer_params": params}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=100, trust_env=False)
    return reply.raise_for_status().json().get("kv_transfer_params")


def test_a_server_says_once_what_the_variable_configured(servers: list[str], folder: Path) -> None:
    """The first one has a flag; both have a process for HTTP and one for the engine."""
    logs = [
        (folder / f"vllm.entrypoints.openai.api_server-{url.rpartition(':')[2]}.log")
        for url in servers
    ]
    first, second = [re.findall(r"KVASS=\S+ (.*)", log.read_text()) for log in logs]
    assert first == ["has no effect: --kv-transfer-config names a connector"]
    (line,) = second
    assert line.startswith("this engine uses kvass: kv_connector KvassConnector, kv_role kv_both")


@pytest.mark.alone  # a server waits 2 s for a grant, and then does not store
def test_the_decode_server_hits_what_the_prefill_server_stored(
    servers: list[str], tmp_path: Path
) -> None:
    """Every block of every prompt, though a prefill answers before its store is committed."""
    lengths = [33, 200, 1000, 1024, 1056, 2112]
    prompts = [some_prompt(tokens, seed=10) for tokens in lengths]
    replies = disaggregated_prefill.play(tmp_path, servers, prompts)
    for prompt, reply in zip(prompts, replies, strict=True):
        assert reply.server == servers[1]
        assert ask(servers[0], prompt).tokens == reply.tokens
    assert [reply.cached for reply in replies] == [whole_blocks(len(p)) for p in prompts]


def test_without_its_prefill_server_the_decode_server_computes(
    servers: list[str], tmp_path: Path
) -> None:
    prompt = some_prompt(1000, seed=20)
    with running_proxy(tmp_path, "--prefill", GONE, servers[1]) as proxy:
        reply = ask(proxy, prompt)
    assert reply.cached == 0
    assert reply.tokens == ask(servers[0], prompt).tokens


def test_a_prefill_is_one_token_of_any_request() -> None:
    wanted = {"prompt": [1], "seed": 7}
    request = wanted | {"max_tokens": 50, "min_tokens": 9, "n": 3, "stream": True}
    assert for_one_token(request) == wanted | {"max_tokens": 1}


def test_the_page_shows_hits_of_all_whole_blocks() -> None:
    page = "\n".join(SHOWN)
    pairs = re.findall(r"server: (\d+) prompt tokens, (\d+) cached", page)
    first, *hits = [(int(tokens), int(cached)) for tokens, cached in pairs]
    assert first[1] == 0
    assert hits == [(tokens, whole_blocks(tokens)) for tokens in (1000, 1000, 2000, 3000)]


def run(recipe: str, daemon: Daemon, *args: str) -> tuple[int, str]:
    """Its exit status and what it printed."""
    assert EngineProcess.template is not None
    command = [f"examples.{recipe}", "--socket", daemon.socket, *args]
    return EngineProcess.template.fork(command, os.environ, stderr=2).ran()
