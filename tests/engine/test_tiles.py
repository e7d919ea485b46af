"""On a CPU with AMX a worker asks for leave to use it before it loads anything. No such CPU is
needed: torch's two functions are replaced."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import torch

from kvass.connectors.vllm import tiles
from kvass.testing.daemon import Daemon, running_daemon
from tests.support.vllm.ranks import StubModelEngine

PROMPT: Final = list(range(100))


class FakeCPU:
    """``asked``: how often leave was asked for."""

    def __init__(self, has_tiles: bool, gives: bool) -> None:
        self.has_tiles, self.gives, self.asked = has_tiles, gives, 0

    def ask(self) -> bool:
        self.asked += 1
        return self.gives


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with running_daemon(tmp_path) as one:
        yield one


@pytest.fixture
def cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCPU]:
    fake = FakeCPU(*request.param)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: fake.has_tiles)
    monkeypatch.setattr(torch.cpu, "_init_amx", fake.ask)
    tiles._tiles_permitted.cache_clear()
    yield fake
    tiles._tiles_permitted.cache_clear()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "AMX" in r.getMessage()]


@pytest.mark.parametrize("cpu", [(True, True)], indirect=True)
def test_leave_is_asked_for_once_before_anything_is_loaded(
    cpu: FakeCPU, daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    engine = StubModelEngine(daemon.socket, daemon)
    try:
        assert cpu.asked == 1
        engine.wait_connected()
        engine.generate("stored", PROMPT)
        assert engine.world.scheduler.reset_prefix_cache()
        engine.load("loaded", PROMPT)
        assert engine.loads
        StubModelEngine(daemon.socket, daemon).close()
        assert cpu.asked == 1
    finally:
        engine.close()
    assert said(caplog) == []


@pytest.mark.parametrize("cpu", [(True, False)], indirect=True)
def test_without_leave_a_model_in_bfloat16_runs_uncached_and_says_so_once(
    cpu: FakeCPU, daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    engine = StubModelEngine(daemon.socket)
    try:
        for name in ("first", "again"):
            assert len(engine.generate(name, PROMPT).output_token_ids) == 2
            assert engine.world.scheduler.reset_prefix_cache()
        assert not engine.loads
        rank = engine.rank.connector
        rank.register_kv_caches({})
        assert cpu.asked == 1
    finally:
        engine.close()
    (line,) = said(caplog)
    assert "kvass is off" in line
    assert tiles.may_load(torch.float32)


@pytest.mark.parametrize("cpu", [(False, False)], indirect=True)
def test_a_cpu_without_tiles_is_not_asked(cpu: FakeCPU) -> None:
    assert tiles.may_load(torch.bfloat16)
    assert cpu.asked == 0


@pytest.mark.parametrize("cpu", [(True, False)], indirect=True)
def test_with_a_gpu_nobody_is_asked(cpu: FakeCPU, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvass.connectors.vllm.namespace.device_kind", lambda: "cuda")
    assert tiles.may_load(torch.bfloat16)
    assert cpu.asked == 0
