"""For the recipes: vLLM servers and a proxy as processes of their own, and requests to them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import httpx

from examples.tiny import ENGINE, ENVIRONMENT, model, transfer_config
from kvass.testing.daemon import Daemon, running_daemon

START_S: Final = 300.0


class Reply(NamedTuple):
    """The answer to a prompt."""

    server: str
    """Who gave it."""
    prompt_tokens: int
    cached: int
    """Of the prompt, not computed by the server that answered."""
    tokens: list[int]


def ask(url: str, prompt: list[int], max_tokens: int = 16) -> Reply:
    """Send a prompt of token ids."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    reply = httpx.post(
        f"{url}/v1/completions",
        json=body | {"ignore_eos": True, "return_token_ids": True},
        timeout=START_S,
        trust_env=False,
    )
    usage, (choice,) = (reply.raise_for_status().json()[name] for name in ("usage", "choices"))
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    server = reply.headers.get("x-served-by", url)
    return Reply(server, usage["prompt_tokens"], cached, choice["token_ids"])


@contextmanager
def two_servers(folder: Path, **options: Any) -> Iterator[list[str]]:
    """A daemon with ``options``, and two vLLM servers of the tiny model, both connected to it;
    their URLs. The first one is configured by a flag, the second one by the variable ``KVASS``."""
    with (
        running_daemon(folder, l1_size="256MiB", **options) as daemon,
        servers(
            *(folder, daemon, [transfer_config(daemon.socket), {}]),
            KVASS=daemon.socket,
            VLLM_LOGGING_LEVEL="INFO",
        ) as urls,
    ):
        yield urls


@contextmanager
def servers(
    folder: Path,
    daemon: Daemon,
    transfers: Sequence[dict[str, Any]],
    more: Mapping[str, Any] = MappingProxyType({}),
    **environment: str,
) -> Iterator[list[str]]:
    """vLLM servers of the tiny model, with these ``kv_transfer_config`` (none if empty) and
    ``more`` flags, all connected to ``daemon``; their URLs."""
    flags = {
        **ENGINE,
        "model": model(),
        "served_model_name": "tiny",
        "host": "127.0.0.1",
        "enable_prompt_tokens_details": True,
        **more,
    }
    commands = [
        [
            "vllm.entrypoints.openai.api_server",
            *_as_flags(flags | ({"kv_transfer_config": json.dumps(transfer)} if transfer else {})),
        ]
        for transfer in transfers
    ]
    with _serving(folder, commands, **environment) as urls:
        _wait_connected(daemon, len(transfers))
        yield urls


@contextmanager
def running_proxy(folder: Path, *args: str) -> Iterator[str]:
    """``examples.proxy`` with these arguments; its URL."""
    with _serving(folder, [["examples.proxy", *args]], health="docs") as (url,):
        yield url


def _as_flags(options: dict[str, Any]) -> list[str]:
    pairs = [(f"--{name.replace('_', '-')}", value) for name, value in options.items()]
    return [part for name, v in pairs for part in ([name] if v is True else [name, str(v)])]


@contextmanager
def _serving(
    folder: Path, commands: Sequence[Sequence[str]], health: str = "health", **environment: str
) -> Iterator[list[str]]:
    """Run Python modules that serve HTTP, side by side; their URLs once all of them answer."""
    with ExitStack() as stack:
        started = []
        for command in commands:
            port = _free_port()
            log = folder / f"{command[0]}-{port}.log"
            command = [*command, "--port", str(port)]
            stack.enter_context(_process(command, log, environment))
            started.append((f"http://127.0.0.1:{port}", log))
        for url, log in started:
            _wait_for(f"{url}/{health}", log)
        yield [url for url, _ in started]


@contextmanager
def _process(command: list[str], log: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """A process group, ended at the end: a vLLM server has further processes."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdout=file,
            stderr=file,
            env={**ENVIRONMENT, **os.environ, **environment},
            start_new_session=True,
        )
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_for(url: str, log: Path) -> None:
    until = time.monotonic() + START_S
    while True:
        try:
            httpx.get(url, trust_env=False).raise_for_status()
            return
        except httpx.HTTPError:
            if time.monotonic() > until:
                raise RuntimeError(f"{url} never came up: {log.read_text()[-4000:]}") from None
        time.sleep(0.1)


def _wait_connected(daemon: Daemon, engines: int) -> None:
    """A server answers before its engine is connected, and runs uncached until then. ``kvass
    status`` lists who is connected, with all its ranks."""
    until = time.monotonic() + START_S
    while [bool(one["namespace"]) for one in daemon.status()["engines"]] != [True] * engines:
        if time.monotonic() > until:
            raise RuntimeError(f"not {engines} engines: {daemon.status()['engines']}")
        time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
