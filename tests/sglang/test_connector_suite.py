"""The suite of connectors with SGLang's storage backend, called as HiCache calls it."""

from __future__ import annotations

import hashlib
import importlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvass.connectors.sglang.plugin import backend_config
from kvass.testing import ConnectorSuite, EngineUnderTest, RunResult
from kvass.testing.connector_suite import MakeEngine
from tests.support.sglang import fake

TOKENS = 4
PARTS = (32, 64)


class Cached(EngineUnderTest):
    """An engine with one host pool and one storage thread. A page's bytes follow from the weights
    and all tokens up to its end. The answer is all pages."""

    chunk_tokens = TOKENS

    def __init__(
        self, socket: str, weights: str, layout: str = "1", tenant: str = "", *, model: Path
    ) -> None:
        self.weights = weights
        self.pool = fake.HostPool(PARTS, page_size=TOKENS, layers=layout != "1")
        extra = backend_config() | {"kvass.socket": socket, "kvass.model_id": weights}
        if tenant:
            extra["kvass.tenant"] = tenant
        with fake.installed(fake.Engine(model)):
            storage = importlib.import_module("kvass.connectors.sglang.storage")
            vars(storage)["_backends"] = 0
            vars(storage)["CONNECT_S"] = 0.0
            self.backend: Any = storage.KvassStorage(fake.StorageConfig(extra), {})
        self.backend.register_mem_pool_host(self.pool)
        assert self.backend.off == ""
        self.thread = ThreadPoolExecutor(1)

    def run(self, prompt: list[int]) -> RunResult:
        return self.thread.submit(self._run, prompt).result()

    def _run(self, prompt: list[int]) -> RunResult:
        count = len(prompt) // TOKENS
        keys = [self._hash(prompt, page).hex() for page in range(count)]
        there = self.backend.batch_exists(keys, fake.ExtraInfo([]))
        got = self.backend.batch_get_v1(
            keys[:there], self.pool.indices(range(there)), fake.ExtraInfo([])
        )
        loaded = [*got, False].index(False)
        for page in range(loaded, count):
            self._compute(prompt, page)
        new = range(loaded, count)
        self.backend.batch_set_v1(
            keys[loaded:], self.pool.indices(new), fake.ExtraInfo(keys[:loaded])
        )
        pages = [self.pool.page(page) for page in range(count)]
        rest = self._digest(prompt)  # what follows the last page is never stored
        return RunResult((pages, rest), loaded * TOKENS)

    def _hash(self, prompt: list[int], page: int) -> bytes:
        return hashlib.sha256(str(prompt[: (page + 1) * TOKENS]).encode()).digest()

    def _digest(self, prompt: list[int]) -> bytes:
        return hashlib.sha256(f"{self.weights} {prompt}".encode()).digest()

    def _compute(self, prompt: list[int], page: int) -> None:
        content = self._digest(prompt[: (page + 1) * TOKENS]) * 3
        at = 0
        for (start, size), part in zip(self.pool.spans(page), PARTS, strict=True):
            assert size == part
            self.pool.memory[start : start + size] = np.frombuffer(
                content[at : at + size], np.uint8
            )
            at += size

    def abort(self, prompt: list[int]) -> None:
        self.run(prompt[: len(prompt) // 2])

    def wait_connected(self) -> None:
        assert all(store.wait_connected(10) for store in self.backend._stores.values())

    def clear(self) -> None:
        assert self.backend.clear()

    def replace_weights(self, weights: str) -> None:
        """SGLang ends its storage threads and clears the host pool."""
        self.thread.shutdown()
        self.weights = weights
        self.pool.clear()
        self.thread = ThreadPoolExecutor(1)

    def close(self) -> None:
        self.thread.shutdown()
        self.backend.close()


class TestSGLang(ConnectorSuite):
    @pytest.fixture
    def make_engine(self, model: Path) -> MakeEngine:
        return lambda socket, **setup: Cached(socket, **setup, model=model)
