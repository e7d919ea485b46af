"""A vLLM that nobody has tested: the real engine runs uncached and says why in one line. If its
interfaces are as expected, it may be tried."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from kvass._version import TESTED_VLLM
from kvass.connectors.vllm import configuration
from kvass.connectors.vllm.served import Served, judge
from kvass.testing.daemon import Daemon
from tests.engine.conftest import Starter, store
from tests.support.vllm.fake_vllm import UNTESTED, fake_vllm
from tests.support.vllm.scheduler import inert_reason, make_configs, read_setup

POOL = "v1/core/block_pool.py"
CHANGED = (POOL, "def touch(self, blocks:", "def touch(self, *, blocks_of=0, blocks:")
HARMLESS = ("def touch(self, blocks: Sequence[KVCacheBlock])", "def touch(self, blocks, more=0)")
TRY: Final[dict[str, object]] = {"kvass.untested_vllm": True}


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Have the connector find another package than was imported."""

    def to(package: Path) -> None:
        monkeypatch.setattr("vllm.__version__", f"{UNTESTED}+cpu")
        monkeypatch.setattr("vllm.__file__", str(package / "__init__.py"))

    return to


def test_how_a_version_is_served() -> None:
    for version in TESTED_VLLM:
        assert judge(version, ["whatever"]) == judge(version, (), tried=True)
        assert (judge(version, ()).served, judge(version, ()).caches) == (Served.TESTED, True)
    for version in (UNTESTED, f"{min(TESTED_VLLM)}+ourfork"):
        trial, tried = judge(version, ()), judge(version, (), tried=True)
        assert (trial.served, trial.caches) == (tried.served, False) == (Served.ON_TRIAL, False)
        assert tried.caches
        refused = judge(version, [f"name{n} is gone" for n in range(5)], tried=True)
        assert (refused.served, refused.caches) == (Served.REFUSED, False)
        assert "name0 is gone; name1 is gone; name2 is gone and 2 more" in refused.said


def test_it_is_inert_unless_asked_for_and_as_expected(
    pretend: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    same, other = fake_vllm(tmp_path / "same"), fake_vllm(tmp_path / "other", CHANGED)
    pretend(same)
    reason = inert_reason(*make_configs())
    assert f"vLLM {UNTESTED} was never tested" in reason
    assert reason.endswith("set kvass.untested_vllm")
    setup = read_setup(*make_configs(TRY))
    assert setup.identity["engine"] == f"vllm {UNTESTED}", "it shares with no other version"
    read_setup(*make_configs(TRY))
    assert sum("kvass.untested_vllm is set" in r.getMessage() for r in caplog.records) == 1
    pretend(other)
    for options in (None, TRY):
        assert "BlockPool.touch(self, *, blocks_of=0, blocks)" in inert_reason(
            *make_configs(options)
        )
    config, _ = make_configs(TRY | {"kvass.kv_layout": "BLHNC"})
    assert configuration.wanted_layout(config) is None, "nothing of it is used"
    pretend(tmp_path / "nothing")
    assert inert_reason(*make_configs(TRY)).endswith("more; kvass doctor shows all")


@pytest.mark.engine
def test_real_engines(daemon: Daemon, start: Starter, tmp_path: Path) -> None:
    def engine(name: str, *changes: tuple[str, str, str], **fields: Any) -> Any:
        fake_vllm(tmp_path / name, *changes)
        path = os.pathsep.join([str(tmp_path / name), os.environ["PYTHONPATH"]])
        socket = Path(daemon.socket)
        return start(name, socket=socket, environment={"PYTHONPATH": path}, **fields)

    tried = engine("untested", options=TRY)
    other = engine("changed", (POOL, *HARMLESS), options=TRY)
    tokens = [7 + number % 50 for number in range(600)]
    first = store(tried.wait_ready(), tokens, 8)
    warm = tried.one(tokens, 8)
    assert (warm.external, warm.tokens) == (576, first.tokens)
    for _ in range(2):
        answer = other.wait_ready().one(tokens, 8)
        assert (answer.external, answer.tokens) == (0, first.tokens)
        assert other.reset()
    lines = [line for line in other._log.read_text().splitlines() if "kvass" in line.lower()]
    said = [line for line in lines if "runs uncached" in line]
    assert len(said) == 1, lines
    assert "BlockPool.touch(self, blocks, more=0) in v1/core/block_pool.py was" in said[0]
