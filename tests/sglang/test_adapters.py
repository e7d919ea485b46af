"""LoRA adapters and salts of real SGLang servers: nobody reads pages of another adapter or salt."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from kvass.connectors.sglang.plugin import backend_config
from kvass.testing.daemon import Daemon, running_daemon
from tests.sglang.test_servers import INSTALLED, NEWEST, SHORT, THRESHOLD, rows, stored
from tests.support.sglang.server import Answer, Server
from tests.support.vllm.models import TINY, build, write_lora

PAGES = len(SHORT) // 64

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(INSTALLED is None, reason="make test-sglang runs it"),
]


def server(folder: Path, name: str, daemon: Daemon, adapters: dict[str, Path]) -> Server:
    """A server whose weights are never replaced, so a flush of its cache changes nothing."""
    extra = backend_config() | {"kvass.socket": daemon.socket, "kvass.fixed_weights": True}
    named = [f"{name}={path}" for name, path in adapters.items()]
    lora = ("--enable-lora", "--lora-backend", "torch_native", "--lora-paths", *named)
    model = build(folder.parent / "models", TINY)
    return Server(NEWEST, model, folder / f"{name}.log", more=lora, extra=extra | THRESHOLD)


class Asked:
    """Asks one server for one prompt, and waits until the daemon has its pages."""

    def __init__(self, one: Server, daemon: Daemon) -> None:
        self.server, self.daemon = one, daemon

    def new(self, **request: Any) -> Answer:
        """Nothing of it may be found."""
        before = rows(self.daemon)
        answer = self.server.generate(SHORT, **request)
        assert (answer.cached, answer.stored) == (0, 0), request
        stored(self.daemon, before + PAGES)
        return answer

    def again(self, right: Answer, **request: Any) -> None:
        """All of it must be found in kvass, with the same tokens."""
        self.server.flush()
        answer = self.server.generate(SHORT, **request)
        assert answer.stored == (len(SHORT) - 1) // 64 * 64, request
        assert answer.tokens == right.tokens, request


def test_adapters_and_salts_share_with_themselves_only(tmp_path: Path) -> None:
    adapters = {name: tmp_path / name for name in ("x", "y")}
    for seed, path in enumerate(adapters.values()):
        write_lora(path, TINY, seed)
    with running_daemon(tmp_path, lookup_budget_ms=10_000) as daemon:
        with server(tmp_path, "first", daemon, adapters) as one:
            first = Asked(one.wait_ready(), daemon)
            requests = [{}, {"lora_path": "x"}, {"lora_path": "y"}]
            requests += [{"cache_salt": "a"}, {"cache_salt": "b"}]
            answers = [first.new(**request) for request in requests]
            base, x, y, *salted = [answer.tokens for answer in answers]
            assert base != x != y != base
            assert salted == [base, base]
            for answer, request in zip(answers, requests, strict=True):
                first.again(answer, **request)
            check_loaded_anew(first, tmp_path)
        shutil.rmtree(adapters["x"])
        write_lora(adapters["x"], TINY, 7)
        with server(tmp_path, "second", daemon, adapters) as two:
            second = Asked(two.wait_ready(), daemon)
            changed = second.new(lora_path="x")
            assert changed.tokens != x, "the adapter that was changed in place"
            second.again(changed, lora_path="x")


def check_loaded_anew(asked: Asked, folder: Path) -> None:
    """An adapter of one name and one path that is loaded at run time, twice, with other weights."""
    path = folder / "z"
    write_lora(path, TINY, 5)
    load = {"lora_name": "z", "lora_path": str(path)}
    asked.server.post("/load_lora_adapter", load)
    old = asked.new(lora_path="z")
    asked.again(old, lora_path="z")
    asked.server.post("/unload_lora_adapter", {"lora_name": "z"})
    shutil.rmtree(path)
    write_lora(path, TINY, 6)
    asked.server.post("/load_lora_adapter", load)
    asked.server.flush()
    assert asked.new(lora_path="z").tokens != old.tokens
