"""What SGLang's scheduler gets from the linker, with a fake SGLang and a real daemon."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvass.testing.daemon import Daemon, running_daemon
from tests.sglang.test_storage import KEYS
from tests.support.sglang import fake
from tests.support.sglang.fake_linker import (
    MHATokenToKVPool,
    MLATokenToKVPool,
    OtherPool,
    Params,
    installed,
    transfer,
)

WAIT_S = 20.0
FULL = (SimpleNamespace(name="FULL"),)


class Linkers:
    """Makes linkers as SGLang does, and closes them."""

    def __init__(self, daemon: Daemon, module: Any, stack: ExitStack) -> None:
        self._socket, self._module, self._stack = daemon.socket, module, stack

    def make(self, pool: Any, components: Any = FULL, **given: Any) -> Any:
        """``given``: options, and fields of ``Params``."""
        options = {"kvass.socket": self._socket} | given.pop("options", {})
        storage = vars(self._module)["KvassStorage"].__module__
        assert storage == "kvass.connectors.sglang.storage"
        vars(__import__(storage, fromlist=["x"]))["_backends"] = 0
        linker = self._module.KvassLinker(
            None, Params(pool, **given), components=components, extra_config=options
        )
        self._stack.callback(linker.close)
        return linker


@pytest.fixture
def linkers(daemon: Daemon, model: Path) -> Iterator[Linkers]:
    settings = {"enable_unified_cache_external_linker": True}
    engine = fake.Engine(model, values=settings, attached_later=True)
    with installed(engine) as module, ExitStack() as stack:
        yield Linkers(daemon, module, stack)


def stored(linker: Any, pool: Any, count: int = 8) -> list[bytes]:
    """Offload pages 3 and later under ``KEYS``; their bytes."""
    pages = range(3, 3 + count)
    content = [pool.fill(page, page) for page in pages]
    assert linker.offload(transfer(KEYS[:count], pages), session_id="a")
    assert result(linker)
    return content


def result(linker: Any) -> bool:
    """The result of the oldest offload."""
    deadline = time.monotonic() + WAIT_S
    while not linker.num_completed_offloads():
        assert time.monotonic() < deadline, "an offload has no result"
        time.sleep(0.002)
    return bool(linker.pop_completed_offload())


@pytest.mark.parametrize("kind", [MHATokenToKVPool, MLATokenToKVPool])
def test_another_engine_loads_what_one_offloaded(linkers: Linkers, kind: Any) -> None:
    pools = kind(), kind()
    a, b = (linkers.make(pool) for pool in pools)
    content = stored(a, pools[0])
    assert b.lookup("r", transfer(KEYS)) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert b.start_layer_wise_loading() == -1
    pages = [30, 11, 1, 2, 9, 8, 7, 39]
    assert b.load("r", transfer(KEYS, pages))
    assert [pools[1].page(page) for page in pages] == content, "they are there when load returns"
    number = b.start_layer_wise_loading()
    assert number >= 0
    assert b.finish_layer_wise_loading(number)
    assert b.start_layer_wise_loading() == -1


def test_a_load_of_pages_that_are_not_all_there_is_refused(linkers: Linkers) -> None:
    pool = MHATokenToKVPool()
    linker = linkers.make(pool)
    stored(linker, pool, 3)
    assert linker.lookup("r", transfer(KEYS)) == [1, 2, 3]
    assert not linker.load("r", transfer(KEYS[:4], [20, 21, 22, 23]))
    assert linker.start_layer_wise_loading() == -1
    assert not linker.cancel_queued_load("r")
    assert linker.load("r", transfer(KEYS[:3], [20, 21, 22]))
    assert linker.cancel_queued_load("r")
    assert linker.start_layer_wise_loading() == -1


def test_long_loads_are_several_calls(linkers: Linkers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvass.connectors.sglang.linker.MOST_PAGES", 3)
    pool = MHATokenToKVPool()
    linker = linkers.make(pool)
    content = stored(linker, pool)
    assert linker.load("r", transfer(KEYS, range(20, 28)))
    assert [pool.page(page) for page in range(20, 28)] == content


def test_after_a_reset_nothing_older_is_loaded(linkers: Linkers) -> None:
    pool = MHATokenToKVPool()
    a, b = linkers.make(pool), linkers.make(MHATokenToKVPool())
    stored(a, pool)
    a.reset()
    assert a.lookup("r", transfer(KEYS)) == []
    stored(a, pool, 2)
    assert a.lookup("r", transfer(KEYS)) == [1, 2]
    assert b.lookup("r", transfer(KEYS)) == list(range(1, 9)), "b has the old weights still"


def test_fixed_weights_outlive_a_reset(linkers: Linkers) -> None:
    pool = MHATokenToKVPool()
    linker = linkers.make(pool, options={"kvass.fixed_weights": True})
    stored(linker, pool)
    linker.reset()
    assert linker.lookup("r", transfer(KEYS)) == list(range(1, 9))


def test_a_reset_waits_for_what_is_being_stored(
    linkers: Linkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = MHATokenToKVPool()
    linker = linkers.make(pool)
    began, go_on, ended = (threading.Event() for _ in range(3))

    def store(*_: object) -> bool:
        began.set()
        assert go_on.wait(WAIT_S)
        ended.set()
        return True

    monkeypatch.setattr(linker, "_store", store)
    for page in range(3):
        assert linker.offload(transfer(KEYS[:1], [page]))
    assert began.wait(WAIT_S)
    threading.Timer(0.1, go_on.set).start()
    linker.reset()
    assert ended.is_set()
    assert linker.num_completed_offloads() == 0, "SGLang has forgotten them"


def test_ranks_agree_about_a_load(linkers: Linkers, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = MHATokenToKVPool()
    linker = linkers.make(pool)
    stored(linker, pool)
    monkeypatch.setattr(linker._ranks, "all_true", lambda value: False)
    assert not linker.load("r", transfer(KEYS, range(20, 28))), "another rank has not got it"
    assert linker.start_layer_wise_loading() == -1


@pytest.mark.parametrize(("kind", "stores"), [(MHATokenToKVPool, True), (MLATokenToKVPool, False)])
def test_of_ranks_with_equal_bytes_one_stores(linkers: Linkers, kind: Any, stores: bool) -> None:
    pool = kind()
    linker = linkers.make(pool)
    linker._ranks.rank = 1
    assert linker.offload(transfer(KEYS, range(8)))
    assert result(linker)
    assert bool(linker.lookup("r", transfer(KEYS))) == stores


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "another pool": (OtherPool, {}, "OtherPool"),
    "windows": (MHATokenToKVPool, {"components": [SimpleNamespace(name="SWA")]}, "SWA"),
    "speculation": (MHATokenToKVPool, {"is_eagle": True}, "speculative"),
    "drafts": (MHATokenToKVPool, {"mtp_draft_device_pools": (1,)}, "speculative"),
    "pipeline": (MHATokenToKVPool, {"pp_size": 2}, "pipeline"),
    "context": (MHATokenToKVPool, {"attn_cp_size": 2}, "context parallelism"),
    "option": (MHATokenToKVPool, {"options": {"kvass.sockets": "x"}}, "kvass.sockets"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_served_runs_uncached(
    linkers: Linkers, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    kind, given, text = REFUSED[case]
    with caplog.at_level(logging.WARNING):
        linker = linkers.make(kind(), **given)
    (line,) = [record for record in caplog.records if "kvass is off" in record.message]
    assert text in line.message
    assert_inert(linker)


def assert_inert(linker: Any) -> None:
    """All is a miss, and every call of SGLang is answered."""
    assert linker.offload(transfer(KEYS, range(8)))
    assert not result(linker)
    assert linker.lookup("r", transfer(KEYS)) == []
    assert not linker.load("r", transfer(KEYS, range(8)))
    assert linker.start_layer_wise_loading() == -1
    linker.reset()


@pytest.mark.parametrize(
    ("name", "value"),
    [("device", "cuda:0"), ("kv_cache_layout", "hnd"), ("k_scale_buffer", [1])],
)
def test_a_pool_that_cannot_be_copied_is_refused(
    linkers: Linkers, caplog: pytest.LogCaptureFixture, name: str, value: Any
) -> None:
    pool = MHATokenToKVPool()
    setattr(pool, name, value)
    with caplog.at_level(logging.WARNING):
        linker = linkers.make(pool)
    assert "kvass is off" in caplog.text
    assert_inert(linker)


def test_nothing_that_sglang_gives_raises(linkers: Linkers) -> None:
    linker = linkers.make(MHATokenToKVPool())
    stored(linker, linker._pool.device_pool)
    assert linker.lookup("r", []) == []
    assert not linker.load("r", [])
    assert not linker.load("r", transfer(KEYS, range(7)))
    assert not linker.load("r", transfer(KEYS[:1], [1000]))
    odd = transfer(KEYS[:1], [1])
    odd[0].device_indices += 1
    assert not linker.load("r", odd), "the middle of a page"
    for bad in ([], odd, transfer(KEYS, range(7)), [None]):
        assert linker.offload(bad)
        assert not result(linker)


def test_without_a_daemon_all_is_a_miss(linkers: Linkers, tmp_path: Path) -> None:
    with running_daemon(tmp_path, l1_size="64MiB") as daemon:
        pool = MHATokenToKVPool()
        linker = linkers.make(pool, options={"kvass.socket": daemon.socket})
        stored(linker, pool)
        daemon.suspend()
        assert linker.lookup("r", transfer(KEYS)) == []
        daemon.resume()
        daemon.kill()
        assert_inert(linker)
