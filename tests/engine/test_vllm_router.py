"""vLLM's router with the policy that reads KV events: a row of kvass decides where a prompt goes.

The router and the daemon are real, and so are vLLM's schedulers and publishers. There is no model:
what answers the router's requests only says who it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from kvass import Client
from kvass.testing.daemon import Daemon, running_daemon
from tests.engine.test_dynamo import BusyEngine
from tests.engine.test_scheduler_events import prompt
from tests.support.servers.routers import VllmRouter
from tests.support.servers.server import free_port
from tests.support.vllm.ranks import making, until
from tests.support.vllm.scheduler import BLOCK


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with running_daemon(tmp_path, lookup_budget_ms=10_000) as one:
        yield one


class Answers(BaseHTTPRequestHandler):
    """A server's: that it lives, and for each prompt its port."""

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self._answer({"port": self.connection.getsockname()[1]})

    def _answer(self, fields: dict[str, object]) -> None:
        body = json.dumps(fields).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def server() -> Iterator[int]:
    """Its port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as one:
        Thread(target=one.serve_forever, daemon=True).start()
        yield one.server_port
        one.shutdown()


class Engine(BusyEngine):
    """An engine with room for 19 blocks, and the server that stands for it."""

    def __init__(self, daemon: Daemon, server: int) -> None:
        ports = [free_port(12_000, 22_000) for _ in range(2)]
        at, replay_at = ports
        events = {"endpoint": f"tcp://*:{at}", "replay_endpoint": f"tcp://127.0.0.1:{replay_at}"}
        super().__init__(daemon.socket, daemon, kv_events=events, blocks=20)
        self.url = f"http://127.0.0.1:{server}"
        events_at, again_at = [f"{self.url}=tcp://127.0.0.1:{port}" for port in ports]
        self.flags = ["--kv-event-source", events_at, "--kv-event-replay-source", again_at]


def test_a_prompt_goes_to_the_engine_that_has_it_in_l1(daemon: Daemon) -> None:
    """The engine's own cache has evicted it. After a clear it goes where it went at first."""
    tokens = prompt(1000)
    with server() as one, server() as other, making(partial(Engine, daemon)) as make:
        engines = {port: make(port) for port in (one, other)}
        flags = ["--kv-event-model", "model", "--kv-event-block-size", str(BLOCK)]
        flags += [flag for engine in engines.values() for flag in engine.flags]
        urls = [engine.url for engine in engines.values()]
        with closing(VllmRouter(urls, "kv_aware", *flags)) as router:

            def chosen() -> set[int]:
                return {router.chosen(tokens) for _ in range(5)}

            (first,) = chosen()
            (second,) = engines.keys() - {first}
            engine = engines[second]
            for number in range(1000, 1005):
                engine.generate(f"{number}", prompt(number))
            begin = engine.world._hasher(Request("", tokens, SamplingParams(), None))[0]
            assert engine.world.pool.get_cached_block(begin, [0]) is None
            until(lambda: engine.step() and chosen() == {second}, "its rows are known")
            with Client(daemon.socket) as client:
                client.clear(everything=True)
            until(lambda: engine.step() and chosen() == {first}, "they are withdrawn")
