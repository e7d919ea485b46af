"""The engine of docs/embedding.md: it loads what it stored, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from examples.embedding import CHUNK, Engine, compute, keys_of, main
from kvass.testing.daemon import Daemon, running_daemon

ROOT = Path(__file__).parent.parent.parent
KEYS = keys_of(list(range(1100)))


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with running_daemon(tmp_path, "16MiB") as one:
        yield one
        one.wait_until(pins=0, leases=0, reservations=0, sessions=1)


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[Engine]:
    one = Engine(daemon.socket, "test", "weights 1")
    yield one
    one.close()


def test_a_second_engine_loads_what_the_first_one_computed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    page = (ROOT / "docs" / "embedding.md").read_text()
    assert printed.splitlines() == [line for line in page.splitlines() if " loaded, " in line]


def test_negative_control_a_wrong_page_is_seen(
    daemon: Daemon, engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = compute(KEYS)
    pages[2, 1, 3, 4] ^= 1
    assert engine.store(KEYS, pages) == 4
    assert main(["--socket", daemon.socket]) == 1
    assert "4 loaded, 0 stored, WRONG" in capsys.readouterr().out


def test_a_prompt_that_goes_on_otherwise_shares_its_first_chunks(engine: Engine) -> None:
    assert engine.store(KEYS, compute(KEYS)) == 4
    other = keys_of([*range(600), *range(500)])
    loaded = engine.load(other)
    assert np.array_equal(loaded, compute(KEYS[:2]))
    rest = compute(other[len(loaded) :])
    assert engine.store(other, np.concatenate([loaded, rest])) == len(other) - 2
    assert np.array_equal(engine.load(other), compute(other))


def test_other_weights_find_nothing(daemon: Daemon, engine: Engine) -> None:
    assert engine.store(KEYS, compute(KEYS)) == 4
    other = Engine(daemon.socket, "other", "weights 2")
    assert other.load(KEYS).shape == (0, *CHUNK)
    other.close()


def test_a_copy_that_ends_late_is_a_miss(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine.store(KEYS, compute(KEYS)) == 4
    with monkeypatch.context() as patch:
        late = SimpleNamespace(monotonic=lambda: time.monotonic() + 1e9, sleep=time.sleep)
        patch.setattr("examples.embedding.time", late)
        assert len(engine.load(KEYS)) == 0
    assert len(engine.load(KEYS)) == 4


def test_without_its_daemon_it_computes_and_goes_on_when_it_is_back(
    daemon: Daemon, engine: Engine
) -> None:
    assert engine.store(KEYS, compute(KEYS)) == 4
    daemon.kill()
    assert len(engine.load(KEYS)) == 0
    assert engine.store(KEYS, compute(KEYS)) == 0
    daemon.start()
    engine.rank.connect(timeout_s=10)
    engine.scheduler.connect(timeout_s=10)
    assert len(engine.load(KEYS)) == 0
    assert engine.store(KEYS, compute(KEYS)) == 4
    assert len(engine.load(KEYS)) == 4
