"""The storage backend of SGLang, with a fake SGLang and a real daemon."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvass.connectors.sglang.plugin import backend_config
from kvass.engine import weights
from kvass.testing.daemon import Daemon, running_daemon
from tests.support.sglang import fake


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("sglang")
    with running_daemon(folder, l1_size="64MiB", lookup_budget_ms=10_000) as one:
        yield one


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The folder of a model, with weights that no other test has."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(str(tmp_path).encode())
    (folder / "config.json").write_text("{}")
    return folder


class Backends:
    """Makes backends as SGLang does, each with one KV pool, and closes them."""

    def __init__(self, daemon: Daemon, model: Path) -> None:
        self.engine = fake.Engine(model)
        self._socket = daemon.socket
        self._stack = ExitStack()

    def make(self, pool: Any = None, engine: fake.Engine | None = None, **config: Any) -> Any:
        """A backend whose KV pool is ``pool``. ``config``: fields of SGLang's storage config;
        ``extra``: options that are added to the extra config; ``again``: the process had another
        backend before."""
        again = config.pop("again", False)
        extra = backend_config() | {"kvass.socket": self._socket} | config.pop("extra", {})
        with fake.installed(engine or self.engine):
            storage = importlib.import_module("kvass.connectors.sglang.storage")
            vars(storage)["_backends"] = int(again)
            backend = storage.KvassStorage(fake.StorageConfig(extra, **config), {})
        self._stack.callback(backend.close)
        backend.register_mem_pool_host(pool or fake.HostPool([512]))
        return backend

    def __enter__(self) -> Backends:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


@pytest.fixture
def backends(daemon: Daemon, model: Path) -> Iterator[Backends]:
    with fake.installed(fake.Engine(model)), Backends(daemon, model) as made:
        yield made


@pytest.fixture(autouse=True)
def process_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engines of a test start after its files were written."""
    monkeypatch.setattr(weights, "started_ns", lambda: time.time_ns())
