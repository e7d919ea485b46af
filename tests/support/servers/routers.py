"""Routers that others wrote, each a process of its own.

``make test`` installs them (``requirements/routers.txt``) in a folder that is not on the path of
any engine: Dynamo's package has plugins for vLLM.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx

from tests.support.servers.server import WAIT_S, Server, free_port

FOLDER: Final = Path(sys.prefix) / "overlays" / "routers"
MODEL: Final = "model"


class Router(Server):
    """The process that runs ``module`` of Python and serves HTTP at ``url``."""

    module = ""

    def __init__(self) -> None:
        assert FOLDER.exists(), f"make test installs it into {FOLDER}"
        self.port = free_port(22_000, 32_000)
        self.url = f"http://127.0.0.1:{self.port}"
        self._client = httpx.Client(base_url=self.url, trust_env=False, timeout=WAIT_S)
        super().__init__()

    def command(self) -> list[str]:
        program = [sys.executable, "-m", self.module, "--port", str(self.port)]
        return ["env", f"PYTHONPATH={FOLDER}", "DYN_LOG=error", *program, *self.flags()]

    def flags(self) -> Sequence[str]:
        """More of its command line."""
        raise NotImplementedError

    def answers(self) -> bool:
        try:
            return self._client.get("/health").is_success
        except httpx.TransportError:
            return False

    def close(self) -> None:
        super().close()
        self._client.close()


class VllmRouter(Router):
    """vLLM's router: a proxy that chooses one of ``servers`` for each request, by default in turn.
    ``more``: flags of the policy."""

    module = "vllm_router.launch_router"

    def __init__(self, servers: Sequence[str], policy: str = "round_robin", *more: str) -> None:
        self._flags = ["--worker-urls", *servers, "--policy", policy, *more]
        super().__init__()

    def flags(self) -> Sequence[str]:
        metrics = str(free_port(12_000, 22_000))
        here = ["--host", "127.0.0.1", "--prometheus-port", metrics]
        return [*self._flags, *here, "--log-level", "error"]

    def chosen(self, tokens: Sequence[int]) -> int:
        """Who gets a prompt, of servers that answer with their port."""
        body = {"model": MODEL, "prompt": list(tokens), "max_tokens": 1}
        reply = self._client.post("/v1/completions", json=body).raise_for_status()
        port: int = reply.json()["port"]
        return port


class Claim(NamedTuple):
    """How many tokens of a prompt's beginning an engine has, as the indexer says."""

    gpu: int
    cpu: int
    """With those before them that only its own cache has."""
    disk: int
    """With those before them that only these two have."""


class DynamoIndexer(Router):
    """Dynamo's indexer: what a router of Dynamo's knows of engines, by their KV events. It listens
    to those that are registered. It answers on all interfaces, and has no option for that."""

    module = "dynamo.indexer"

    def flags(self) -> Sequence[str]:
        return ["--threads", "1"]

    def register(self, engine: int, endpoint: str, replay: str | None, block: int) -> None:
        """Listen to an engine with blocks of ``block`` tokens."""
        names = {"endpoint": endpoint, "replay_endpoint": replay, "block_size": block}
        self._post("register", instance_id=engine, **names)

    def unregister(self, engine: int) -> None:
        """Forget an engine and all that it has."""
        self._post("unregister", instance_id=engine)

    def claim(self, engine: int, tokens: Sequence[int]) -> Claim:
        """What an engine has of a prompt."""
        found = self._post("query", token_ids=list(tokens))["instances"].get(str(engine), {})
        return Claim(*(found.get(medium, 0) for medium in Claim._fields))

    def held(self, engine: int) -> Claim:
        """How many blocks an engine has in all: in its own cache, on the host, and in storage."""
        (index,) = self._client.get("/dump").raise_for_status().json().values()
        blocks: Counter[str] = Counter()
        for one in index["events"]:
            if one["worker_id"] == engine:
                blocks[one["storage_tier"]] += len(one["event"]["data"]["stored"]["blocks"])
        assert blocks.keys() <= {"device", "host_pinned", "disk"}
        return Claim(blocks["device"], blocks["host_pinned"], blocks["disk"])

    def _post(self, path: str, **fields: Any) -> Any:
        reply = self._client.post(path, json={"model_name": MODEL, **fields})
        return reply.raise_for_status().json()
