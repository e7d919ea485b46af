"""What SGLang's threads get from the storage backend."""

from __future__ import annotations

import hashlib
import itertools
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvass.connectors.sglang import hits
from kvass.testing.daemon import Daemon, running_daemon
from tests.sglang.conftest import Backends
from tests.support.sglang import fake

POOLS: dict[str, Any] = {
    "page_first": lambda: fake.HostPool([1024, 1024]),
    "layer_first": lambda: fake.HostPool([256] * 8, layers=True),
    "mla": lambda: fake.HostPool([576]),
    "states": lambda: fake.HostPool([96, 4096, 32], page_size=1),
    "a token": lambda: fake.HostPool([64, 64], page_size=1),
}


def keys_of(count: int, name: str = "") -> list[str]:
    """Hashes as SGLang makes them."""
    return [hashlib.sha256(f"{name}{number}".encode()).hexdigest() for number in range(count)]


KEYS = keys_of(8)


def filled(pool: Any, pages: range, seed: int = 0) -> list[bytes]:
    return [pool.fill(page, seed + page) for page in pages]


def store(backend: Any, pool: Any, count: int = 8) -> list[bytes]:
    """Store pages 3 and later under ``KEYS``; their bytes."""
    pages = range(3, 3 + count)
    content = filled(pool, pages)
    assert all(backend.batch_set_v1(KEYS[:count], pool.indices(pages), fake.ExtraInfo([])))
    return content


@pytest.mark.parametrize("kind", POOLS)
def test_another_engine_reads_what_one_stored(backends: Backends, kind: str) -> None:
    pools = POOLS[kind](), POOLS[kind]()
    a, b = (backends.make(pool) for pool in pools)
    content = store(a, pools[0])
    assert b.batch_exists(KEYS, fake.ExtraInfo([])) == 8
    pages = [30, 11, 0, 1, 2, 9, 8, 7]
    assert b.batch_get_v1(KEYS, pools[1].indices(pages), fake.ExtraInfo([])) == [True] * 8
    assert [pools[1].page(page) for page in pages] == content


def test_what_nobody_stored_is_a_miss(backends: Backends) -> None:
    pool = fake.HostPool([512])
    backend = backends.make(pool)
    store(backend, pool, 3)
    assert backend.batch_exists(KEYS) == 3
    assert backend.batch_get_v1(KEYS, pool.indices(range(8))) == [True] * 3 + [False] * 5
    assert backend.exists(KEYS[0])
    assert not backend.exists(KEYS[5])


def test_it_clears_its_own_pages(backends: Backends) -> None:
    pool = fake.HostPool([512])
    backend = backends.make(pool)
    store(backend, pool)
    assert backend.clear()
    assert backend.batch_exists(KEYS) == 0


# ---------------------------------------------------------------- who shares


def shares(backends: Backends, **other: Any) -> bool:
    """Whether an engine reads what another one stored that differs from it by ``other``."""
    pools = fake.HostPool([512]), other.pop("pool", None) or fake.HostPool([512])
    a = backends.make(pools[0])
    b = backends.make(pools[1], **other)
    assert (a.off, b.off) == ("", "")
    store(a, pools[0])
    return bool(b.batch_exists(KEYS))


def test_equal_engines_share(backends: Backends, model: Path) -> None:
    elsewhere = shutil.copytree(model, model.parent / "copied")
    (elsewhere / "README.md").write_text("another text")
    assert shares(backends, engine=fake.Engine(elsewhere))


@pytest.mark.parametrize(
    "settings",
    [{"attention_backend": "y"}, {"a_setting_of_a_later_version": 1}],
    ids=["known", "new"],
)
def test_other_settings_do_not_share(backends: Backends, model: Path, settings: Any) -> None:
    assert not shares(backends, engine=fake.Engine(model, settings=settings))


def test_settings_that_are_left_out_share(backends: Backends, model: Path) -> None:
    assert shares(backends, engine=fake.Engine(model, settings={"log_level": "debug"}))


@pytest.mark.parametrize(
    "config",
    [
        {"tp_size": 2},
        {"tp_size": 2, "is_mla_model": True},
        {"pp_size": 2},
        {"extra": {"kvass.tag": "another"}},
    ],
    ids=str,
)
def test_other_ranks_and_tags_do_not_share(backends: Backends, config: Any) -> None:
    assert not shares(backends, **config)


def test_ranks_of_an_mla_model_share(backends: Backends) -> None:
    pools = fake.HostPool([512]), fake.HostPool([512])
    ranks = [
        backends.make(pool, tp_rank=rank, tp_size=2, is_mla_model=True)
        for rank, pool in enumerate(pools)
    ]
    store(ranks[0], pools[0])
    assert ranks[1].batch_exists(KEYS) == 8


def test_mla_models_on_other_numbers_of_ranks_do_not_share(backends: Backends) -> None:
    pool = fake.HostPool([512])
    store(backends.make(pool, is_mla_model=True), pool)
    assert backends.make(is_mla_model=True).batch_exists(KEYS) == 8
    assert backends.make(is_mla_model=True, tp_size=2).batch_exists(KEYS) == 0


def test_ranks_of_a_dense_model_do_not_share(backends: Backends) -> None:
    pool = fake.HostPool([512])
    store(backends.make(pool, tp_rank=0, tp_size=2), pool)
    assert backends.make(tp_rank=0, tp_size=2).batch_exists(KEYS) == 8
    assert backends.make(tp_rank=1, tp_size=2).batch_exists(KEYS) == 0


def test_another_layout_does_not_share(backends: Backends) -> None:
    assert not shares(backends, pool=fake.HostPool([512], layers=True))


def test_other_weights_do_not_share(backends: Backends, model: Path) -> None:
    other = shutil.copytree(model, model.parent / "other")
    (other / "model.safetensors").write_bytes(b"other weights")
    assert not shares(backends, engine=fake.Engine(other))


def test_a_file_that_a_setting_names_counts_by_content(backends: Backends, model: Path) -> None:
    scales = [model.parent / name for name in ("a.json", "b.json")]
    for number, file in enumerate(scales):
        file.write_text(str(number))
    engines = [fake.Engine(model, values={"quantization_param_path": str(scales[0])})] * 2
    pool = fake.HostPool([512])
    store(backends.make(pool, engines[0]), pool)
    assert backends.make(engine=engines[1]).batch_exists(KEYS) == 8
    shutil.copy(scales[1], scales[0])
    assert backends.make(engine=engines[1]).batch_exists(KEYS) == 0


def test_an_adapter_that_changes_on_disk_does_not_share(backends: Backends, model: Path) -> None:
    adapter = model.parent / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(b"1")
    engine = fake.Engine(model, values={"lora_paths": [f"name={adapter}"]})
    pool = fake.HostPool([512])
    store(backends.make(pool, engine), pool)
    assert backends.make(engine=engine).batch_exists(KEYS) == 8
    (adapter / "adapter_model.safetensors").write_bytes(b"2")
    assert backends.make(engine=engine).batch_exists(KEYS) == 0


# ---------------------------------------------------------------- bad input, and daemons in trouble


class NoAddresses(fake.HostPool):
    def get_page_buffer_meta(self, indices: Any) -> None:
        return None


class Uneven(fake.HostPool):
    def get_page_buffer_meta(self, indices: Any) -> Any:
        starts, sizes = super().get_page_buffer_meta(indices) or ([], [])
        return [start + number**2 for number, start in enumerate(starts)], sizes


class Raises(fake.HostPool):
    def get_page_buffer_meta(self, indices: Any) -> Any:
        raise ValueError("Unsupported layout")


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "option": ({"extra": {"kvass.sockets": "x"}}, "unknown option 'kvass.sockets'"),
    "type": ({"extra": {"kvass.fixed_weights": "maybe"}}, "Expected `bool`, got `str`"),
    "interface": ({"extra": {"interface_v1": 0}}, '"interface_v1": 1'),
    "context parallel": ({"attn_cp_size": 2}, "context parallelism"),
    "decode context parallel": ({"dcp_size": 2}, "context parallelism"),
    "heads": ({"tp_lcm_size": 4}, "tp_lcm_size"),
    "no addresses": ({"pool": NoAddresses([64])}, "gives no addresses"),
    "uneven": ({"pool": Uneven([64])}, "do not lie evenly"),
    "raises": ({"pool": Raises([64])}, "Unsupported layout"),
    "one page": ({"pool": fake.HostPool([64], pages=1)}, "needs two or more"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_not_supported_is_one_line_and_no_cache(
    backends: Backends, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    config, reason = BAD[name]
    with caplog.at_level(logging.WARNING, "kvass"):
        backend = backends.make(**config)
    (line,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert reason in line.getMessage()
    assert line.exc_info is None
    assert_inert(backend)


@pytest.mark.parametrize("version", ["0.5.19", "0.5.24", "0.6.0"])
def test_a_version_never_seen_is_not_cached(
    backends: Backends, model: Path, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    backend = backends.make(engine=fake.Engine(model, version=version))
    assert f"SGLang {version} was never tested" in caplog.text
    assert_inert(backend)


def test_weights_that_cannot_be_named_are_not_cached(
    backends: Backends, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = {"load_format": "remote"}
    assert_inert(backends.make(engine=fake.Engine(model, values=values)))
    assert "load format remote" in caplog.text
    named = {"kvass.model_id": "mine"}
    assert not backends.make(engine=fake.Engine(model, values=values), extra=named).off


def assert_inert(backend: Any) -> None:
    assert backend.off
    pool = fake.HostPool([64])
    assert backend.batch_exists(KEYS) == 0
    assert not any(backend.batch_get_v1(KEYS, pool.indices(range(8))))
    assert not any(backend.batch_set_v1(KEYS, pool.indices(range(8))))
    assert backend.batch_exists_v2(KEYS, [fake.PoolTransfer("swa")]).kv_hit_pages == 0
    assert backend.batch_get(KEYS) == [None] * 8
    assert not backend.batch_set(KEYS)
    assert backend.clear()


def test_pages_that_moved_are_neither_read_nor_written(backends: Backends) -> None:
    pool = fake.HostPool([512])
    backend = backends.make(pool)
    store(backend, pool)
    pool.moved = 64
    assert not any(backend.batch_get_v1(KEYS, pool.indices(range(8))))
    other = keys_of(8, "moved")
    assert not any(backend.batch_set_v1(other, pool.indices(range(8))))
    pool.moved = 0
    assert backend.batch_exists(other) == 0


def test_nothing_raises_whatever_sglang_gives(backends: Backends) -> None:
    """An exception in a storage thread would leave requests without an answer."""
    pool = fake.HostPool([512])
    backend = backends.make(pool)
    wrong: Any = [None, 1]
    info = fake.ExtraInfo(wrong)
    assert backend.batch_exists(KEYS, info) == 0
    assert backend.batch_exists(wrong) == 0
    assert not any(backend.batch_get_v1(KEYS, pool.indices(range(8)), info))
    assert not any(backend.batch_set_v1(KEYS, "indices", fake.ExtraInfo([])))
    transfer = fake.PoolTransfer("no such pool", pool.indices(range(8)), KEYS)
    assert not any(backend.batch_set_v2([transfer])["no such pool"])
    assert not any(backend.batch_get_v2([transfer], info)["no such pool"])
    assert backend.batch_exists_v2(KEYS, wrong).kv_hit_pages == 0


def test_indices_of_other_tokens_are_refused(backends: Backends) -> None:
    pool = fake.HostPool([512])
    backend = backends.make(pool)
    store(backend, pool)
    assert not any(backend.batch_get_v1(KEYS, pool.indices(range(7))))
    assert not any(backend.batch_get_v1(KEYS, None))


def test_a_chain_without_its_beginning_is_warned_of_once(
    backends: Backends, caplog: pytest.LogCaptureFixture
) -> None:
    pool = fake.HostPool([512])
    backend = backends.make(pool)
    backend.batch_set_v1(KEYS[:1], pool.indices([0]), fake.ExtraInfo([]))
    assert "hicache_storage_pass_prefix_keys" not in caplog.text
    for _ in range(2):
        backend.batch_set_v1(KEYS[:1], pool.indices([0]), fake.ExtraInfo())
    assert caplog.text.count("hicache_storage_pass_prefix_keys") == 1


def test_a_daemon_that_comes_goes_and_hangs(model: Path, tmp_path: Path) -> None:
    """Every call is answered, whatever the daemon does."""
    pool = fake.HostPool([512])
    with running_daemon(tmp_path) as own, fake.installed(fake.Engine(model)):
        own.kill()
        with Backends(own, model) as made:
            backend = made.make(pool)
            assert not any(backend.batch_set_v1(KEYS, pool.indices(range(8))))
            own.start()
            connected(backend)
            store(backend, pool)
            own.suspend()
            assert backend.batch_exists(KEYS) == 0
            assert not any(backend.batch_get_v1(KEYS, pool.indices(range(8))))
            own.restart()
            connected(backend)
            assert backend.batch_exists(KEYS) == 0
            store(backend, pool)
            assert backend.batch_exists(KEYS) == 8


def connected(backend: Any) -> None:
    assert all(one.wait_connected(20) for one in backend._stores.values())


# ---------------------------------------------------------------- several pools


def test_hybrid_pools_give_the_lengths_that_all_of_them_allow(backends: Backends) -> None:
    kv, window, states = fake.HostPool([512]), fake.HostPool([128]), fake.HostPool([64, 32])
    backend = backends.make(kv)
    for name, pool in (("kv", kv), ("swa", window), ("mamba", states)):
        backend.register_mem_host_pool_v2(pool, name)
    store(backend, kv)
    transfers = []
    for name, pool, there in (("swa", window, (2, 3, 4, 7)), ("mamba", states, (3, 4))):
        keys = [KEYS[index] for index in there]
        part = fake.PoolTransfer(name, pool.indices(there), keys)
        content = filled(pool, range(8))
        assert backend.batch_set_v2([part]) == {name: [True] * len(there)}
        pool.memory[:] = 0
        assert backend.batch_get_v2([part]) == {name: [True] * len(there)}
        assert [pool.page(page) for page in there] == [content[page] for page in there]
        tail = KEYS[:2] if name == "swa" else KEYS[:1]
        policy = fake.PoolHitPolicy.TRAILING_PAGES
        transfers.append(fake.PoolTransfer(name, None, tail, policy))
    found = backend.batch_exists_v2(KEYS, transfers)
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (5, [4, 5])
    assert found.extra_pool_hit_pages == {"kv": 8, "swa": 5, "mamba": 5}


def test_a_pool_of_all_pages_ends_the_hit(backends: Backends) -> None:
    kv, indexer = fake.HostPool([512]), fake.HostPool([128])
    backend = backends.make(kv)
    backend.register_mem_host_pool_v2(indexer, "indexer")
    store(backend, kv)
    backend.batch_set_v2([fake.PoolTransfer("indexer", indexer.indices(range(3)), KEYS[:3])])
    assert backend.batch_exists_v2(KEYS, [fake.PoolTransfer("indexer")]).kv_hit_pages == 3
    groups = fake.PoolTransfer("indexer", hit_policy=fake.PoolHitPolicy.BLOCK_GROUPS)
    assert backend.batch_exists_v2(KEYS, [groups]).kv_hit_pages == 0


@pytest.mark.parametrize("window", [1, 2, 3, 9])
def test_trailing_pages_are_those_of_sglangs_file_backend(window: int) -> None:
    for there in itertools.product([False, True], repeat=6):
        expected = {
            length
            for length in range(1, 7)
            if all(there[index] for index in range(max(0, length - window), length))
        }
        assert hits.trailing_pages(there, window) == expected


def test_the_daemon_shows_the_engines_name(daemon: Daemon, backends: Backends) -> None:
    pool = fake.HostPool([512])
    store(backends.make(pool), pool)
    models = {row["model"] for row in daemon.status()["namespaces"]}
    assert any(name.startswith("sglang ") for name in models)
