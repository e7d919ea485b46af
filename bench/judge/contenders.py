"""A vLLM server (OpenAI's API) for each contender, all of one model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, Final

import httpx

from bench.engine import ARGS, ENVIRONMENT
from bench.peers.engines import connector
from bench.peers.servers import KvassServer, Server, free_ports
from examples.tiny import ENVIRONMENT as ENGINES
from kvass.cli.bench.rig import wait_for
from kvass.client.client import Client
from kvass.errors import Unavailable
from kvass.messages import MOST_EXPLAINED

CONTENDERS: Final = ("none", "offloading", "lmcache", "kvass")
BLOCKS: Final = 96
"""vLLM's own cache: 3,072 tokens, less than what most workloads ask for again."""
OPTIONS: Final[dict[str, Any]] = ARGS | {
    "max_model_len": 2048,
    "num_gpu_blocks_override": BLOCKS,
    "max_num_seqs": 8,
    "enforce_eager": True,
}
DRAFTS: Final = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
"""The drafter where words matter: what came after the same tokens before. It has no weights."""
START_S: Final = 600.0
ASK_S: Final = 120.0
COUNTERS: Final = {
    "prefix_cache_hits": "vllm:prefix_cache_hits_total",
    "external_prefix_cache_hits": "vllm:external_prefix_cache_hits_total",
}
"""Prompt tokens found in vLLM's own cache, and beside it: of each server's ``/metrics``."""


class Contender:
    """``cache``: the server beside it, which runs. ``drafts``: with an n-gram drafter."""

    def __init__(
        self, name: str, model: Path, log: Path, python: str, cache: Server | None, *, drafts: bool
    ) -> None:
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        self.name, self.model, self._cache, self._log = name, model, cache, log
        options = OPTIONS | {"model": model, "host": "127.0.0.1", "port": port, "seed": 0}
        if transfer := connector(name, cache):
            options["kv_transfer_config"] = json.dumps(transfer)
        if drafts:
            options["speculative_config"] = json.dumps(DRAFTS)
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
        flags = [flag.removesuffix("=True") for flag in flags]
        self.command = [python, "-m", "vllm.entrypoints.openai.api_server", *flags]
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self) -> None:
        """Start it; ``wait_ready`` waits."""
        environment = {**os.environ, **ENGINES, **ENVIRONMENT, "LMCACHE_DISABLE_BANNER": "1"}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def wait_ready(self) -> None:
        """Return once it has answered and its cache is connected. Raises ``Unavailable``."""
        wait_for(self._ready, f"vLLM's server ({self.name})", START_S)
        body = {"prompt": [4 + number for number in range(1000)], "max_tokens": 4}
        try:
            httpx.post(f"{self.url}/v1/completions", json=body, timeout=ASK_S, trust_env=False)
        except httpx.HTTPError as error:
            raise Unavailable(f"its first request failed: {error!r}") from None

    def found(self) -> dict[str, float]:
        """The counters so far, by their short names. Raises ``Unavailable``."""
        try:
            text = httpx.get(f"{self.url}/metrics", timeout=ASK_S, trust_env=False).text
        except httpx.HTTPError as error:
            raise Unavailable(f"no metrics: {error!r}") from None
        return {name: counted(text, series) for name, series in COUNTERS.items()}

    def explained(self) -> list[dict[str, Any]]:
        """What ``kvass explain`` says of the last requests; empty without kvass. Raises
        ``KvassError``."""
        if not isinstance(self._cache, KvassServer):
            return []
        with Client(self._cache.address) as client:
            return client.explain(limit=MOST_EXPLAINED, timeout_s=ASK_S)

    def close(self) -> None:
        """End it and its processes."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self._process.wait()

    def _ready(self) -> bool:
        assert self._process is not None
        if (status := self._process.poll()) is not None:
            errors = re.findall(r"^.*Error: .*$", self._log.read_text(errors="replace"), re.M)
            raise Unavailable(f"it ended with status {status}: {''.join(errors[-1:])[-200:]}")
        try:
            up = httpx.get(f"{self.url}/health", trust_env=False).is_success
        except httpx.HTTPError:
            time.sleep(0.5)
            return False
        if up and isinstance(self._cache, KvassServer):
            with Client(self._cache.address) as client:
                return any(one["namespace"] for one in client.status(ASK_S)["engines"])
        return up


def counted(text: str, series: str) -> float:
    """The sum of a series in the text of ``/metrics``."""
    values = re.findall(rf"^{series}(?:{{[^}}]*}})? (\S+)$", text, re.M)
    return sum(map(float, values))
