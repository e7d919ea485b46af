"""A vLLM that nobody has tested: if its interfaces are as expected, it is served, and more copies
are verified. Else the real engine runs uncached and says why in one line."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from examples.tiny import transfer_config
from kvass._version import TESTED_VLLM
from kvass.connectors import vllm as vllm_connector
from kvass.connectors.vllm import configuration, served
from kvass.connectors.vllm.inert import InertConnector, inert_connector
from kvass.connectors.vllm.served import Served, judge
from kvass.engine.setup import Verification
from kvass.testing.daemon import Daemon
from tests.engine.conftest import Starter, store
from tests.support.vllm.fake_vllm import UNTESTED, fake_vllm, move
from tests.support.vllm.scheduler import (
    inert_reason,
    make_configs,
    make_multi_configs,
    read_setup,
    rig,
)

POOL = "v1/core/block_pool.py"
BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
SCHEDULER = "v1/core/sched/scheduler.py"
GONE = "distributed/kv_transfer/kv_connector/v1/metrics.py"
WIDER, MORE = (
    "num_computed_tokens: int,\n        depth: int,\n",
    "request, block_aligned_local, 1\n",
)
NOVELTY = "    @abstractmethod\n    def novelty(self, request, number): ...\n\n"
BREAKING = [
    (BASE, "num_computed_tokens: int,\n", WIDER),
    (SCHEDULER, "request, block_aligned_local\n", MORE),
    (BASE, "    def on_new_request(", f"{NOVELTY}    def on_new_request("),
    (SCHEDULER, "self.connector.on_new_request(request)", "self.connector.novelty(request, 1)"),
]
"""A hook that is given more, and a hook that every connector must have."""
CHANGED = (POOL, "def touch(self, blocks:", "def touch(self, *, blocks_of=0, blocks:")


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Have the connector find another package than was imported."""

    def to(package: Path) -> None:
        monkeypatch.setattr("vllm.__version__", f"{UNTESTED}+cpu")
        monkeypatch.setattr("vllm.__file__", str(package / "__init__.py"))

    return to


def test_how_a_version_is_served() -> None:
    for version in TESTED_VLLM:
        tested = judge(version, ["whatever"])
        assert (tested.served, tested.caches, tested.message) == (Served.TESTED, True, "")
        assert tested.verification == Verification()
    for version in (UNTESTED, f"{min(TESTED_VLLM)}+ourfork"):
        trial = judge(version, ())
        assert (trial.served, trial.caches) == (Served.ON_TRIAL, True)
        assert trial.verification == Verification(None, trial_every=100, trial_loads=1000)
        refused = judge(version, [f"name{n} is gone" for n in range(5)])
        assert (refused.served, refused.caches) == (Served.REFUSED, False)
        assert "name0 is gone; name1 is gone; name2 is gone and 2 more" in refused.message


def test_it_is_served_on_trial_if_it_is_as_expected(
    pretend: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    same, other = fake_vllm(tmp_path / "same"), fake_vllm(tmp_path / "other", CHANGED)
    pretend(same)
    assert read_setup(*make_configs()).verification == served.TRIAL
    setup = read_setup(*make_configs({"kvass.verify": 0}))
    assert setup.verification == replace(served.TRIAL, every=0), "the trial is not switched off"
    assert setup.identity["engine"] == f"vllm {UNTESTED}", "it shares with no other version"
    (line,) = {r.getMessage() for r in caplog.records if "was never tested" in r.getMessage()}
    assert "one in 100 jobs are verified until 1000 loads were right" in line
    assert sum(r.getMessage() == line for r in caplog.records) == 1, "said once"
    pretend(other)
    assert "BlockPool.touch(self, *, blocks_of=0, blocks)" in inert_reason(*make_configs())
    config, _ = make_configs({"kvass.kv_layout": "BLHNC"})
    assert configuration.wanted_layout(config) is None, "nothing of it is used"
    pretend(tmp_path / "nothing")
    assert inert_reason(*make_configs()).endswith("more; kvass doctor shows all")


def run_uncached(configs: Any = None) -> type:
    """A request in vLLM's real scheduler; the connector's class."""
    client, world = rig(configs=configs or make_configs())
    request = world.add("a", range(100))
    while world.scheduler.has_requests():
        world.step()
    assert request.num_tokens == 104
    assert client.steps == 0
    assert world.scheduler.requires_kv_delivery is False
    assert world.scheduler.reset_prefix_cache(reset_connector=True)
    connector: type = type(world.connector)
    return connector


@pytest.fixture
def fresh() -> Iterator[None]:
    """Which class vLLM gets is decided anew."""
    vllm_connector._connector.cache_clear()
    yield
    vllm_connector._connector.cache_clear()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("inside", ["alone", "MultiConnector"])
def test_where_it_differs_nothing_of_the_connector_runs(
    pretend: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture, inside: str
) -> None:
    pretend(fake_vllm(tmp_path, CHANGED))
    run_uncached(make_multi_configs() if inside == "MultiConnector" else make_configs())
    assert issubclass(vllm_connector.KvassConnector, InertConnector)
    (line,) = [r.getMessage() for r in caplog.records if "kvass is off" in r.getMessage()]
    assert "BlockPool.touch(self, *, blocks_of=0, blocks)" in line


@pytest.mark.usefixtures("fresh")
def test_an_import_that_fails_turns_it_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "kvass.connectors.vllm.entry", None)
    assert issubclass(run_uncached(), InertConnector)
    (line,) = [r for r in caplog.records if "kvass is off" in r.getMessage()]
    assert "ModuleNotFoundError: import of kvass.connectors.vllm.entry" in line.getMessage()
    assert line.levelno == logging.ERROR


def test_of_the_workers_the_first_one_says_it(caplog: pytest.LogCaptureFixture) -> None:
    for rank in (0, 1):
        config, caches = make_configs()
        config.parallel_config.rank = rank
        inert_connector("its reason")(config, KVConnectorRole.WORKER, kv_cache_config=caches)
    (line,) = [r for r in caplog.records if "kvass is off" in r.getMessage()]
    assert line.getMessage().endswith("its reason")
    assert line.levelno == logging.WARNING


@pytest.mark.slow
@pytest.mark.engine
def test_real_engines(daemon: Daemon, start: Starter, tmp_path: Path) -> None:
    """One that is served on trial; one in which a module that we import is gone, a hook is given
    more, and there is a hook that every connector must have."""

    def engine(name: str, **fields: Any) -> Any:
        path = os.pathsep.join([str(tmp_path / name), os.environ["PYTHONPATH"]])
        return start(name, environment={"PYTHONPATH": path}, **fields)

    fake_vllm(tmp_path / "untested")
    move(fake_vllm(tmp_path / "changed", *BREAKING), GONE, GONE.replace("metrics", "figures"))
    tried = engine("untested", socket=Path(daemon.socket))
    other = engine("changed", transfer=transfer_config(daemon.socket))
    tokens = [7 + number % 50 for number in range(600)]
    first = store(tried.wait_ready(), tokens, 8)
    warm = tried.one(tokens, 8)
    assert (warm.external, warm.tokens) == (576, first.tokens)
    assert "0.32.99 was never tested" in tried._log.read_text()
    for _ in range(2):
        answer = other.wait_ready().one(tokens, 8)
        assert (answer.external, answer.tokens) == (0, first.tokens)
        assert other.reset()
    lines = [line for line in other._log.read_text().splitlines() if "kvass" in line.lower()]
    said = [line for line in lines if "runs uncached" in line]
    assert len(said) == 1, lines
    assert "KVConnectorBase_V1.abstract build_connector_meta" in said[0]
    assert "novelty" in said[0]
    assert "get_num_new_matched_tokens(self, request, num_computed_tokens, depth)" in said[0]
