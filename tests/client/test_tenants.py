"""Tenants against a real daemon: a noisy one and one for which room is reserved."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvass.cli.main import main
from kvass.client.parallel import ParallelStrategy
from kvass.testing.daemon import Daemon, running_daemon
from kvass.testing.fake_engine import FakeEngine, spread
from kvass.types import GroupLayout, RankLayout
from kvass.web.metrics import exposition
from tests.client.test_tiers import flushed
from tests.daemon.tier_rig import tier_of
from tests.support.waiting import eventually

CHUNK = 16
WORLD = ParallelStrategy()
LAYOUTS = spread(WORLD, RankLayout((GroupLayout("full", 4, ("l0",), (64 << 10,)),)))
OF_TIER = "disk:/nowhere?capacity=100MiB&quota=a=1MiB"
CALM = [range(1000 * i, 1000 * i + 4 * CHUNK) for i in range(8)]  # 8 prompts of 1 MiB


def engine(daemon: Daemon) -> FakeEngine:
    return FakeEngine(daemon.socket, WORLD, LAYOUTS, chunk_tokens=CHUNK, identity={"model": "m"})


def noise(one: FakeEngine, first: int, count: int = 64) -> None:
    """64 MiB of prompts that are used once, of a tenant that nobody knows."""
    one.tenant = "noisy"
    for i in range(first, first + count):
        assert one.store(range(10**6 + 1000 * i, 10**6 + 1000 * i + 4 * CHUNK)), "it was refused"


def calm(one: FakeEngine) -> int:
    """How many chunks of the calm tenant's prompts are there, each checked byte for byte."""
    one.tenant = "calm"
    chunks = sum(one.load(prompt) for prompt in CALM)
    one.verify()
    return chunks


@pytest.mark.parametrize("quota", ["&quota=calm=:16MiB", ""], ids=["reserved", "control"])
def test_a_noisy_tenant_cannot_push_a_reserved_one_out_of_a_disk_tier(
    tmp_path: Path, quota: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The control's tier has no quota. Nothing is reserved in L1; the daemon is killed once."""
    (disk := tmp_path / "disk").mkdir(mode=0o755)
    options = {"quota": ["calm=:0"], "tier": [f"disk:{disk}?capacity=40MiB{quota}"]}
    with running_daemon(tmp_path, "32MiB", **options) as daemon:
        with engine(daemon) as one:
            one.tenant = "calm"
            assert sum(map(one.store, CALM)) == 32
            for first in range(0, 64, 8):
                flushed(daemon)
                noise(one, first, 8)
        daemon.restart()
        with engine(daemon) as one:
            for first in range(64, 128, 8):
                noise(one, first, 8)
                flushed(daemon)
            assert calm(one) == (32 if quota else 0)
        assert tier_of(daemon)["loaded_rows"] == (32 if quota else 0)
        assert eventually(lambda: tier_of(daemon)["evicted"] > 0)
        if quota:
            tenants = tier_of(daemon)["tenants"]
            assert 8 << 20 <= tenants["calm"]["bytes"] <= 16 << 20
            assert tenants["default"]["bytes"] > 18 << 20, "all but what is reserved"
            assert main(["status", "--socket", daemon.socket]) == 0
            lines = [" ".join(x.split()) for x in capsys.readouterr().out.splitlines()]
            assert any(re.fullmatch(r"calm [\d.]+ MiB - 16.0 MiB", line) for line in lines)
            reserved = 'kvass_tier_tenant_reserved_bytes{tenant="calm",tier="disk"} 1.6777216e+07'
            assert reserved in exposition(daemon.status()).decode()


def test_a_quota_comes_and_goes_while_the_daemon_serves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_daemon(tmp_path, "32MiB") as daemon, engine(daemon) as one:
        at = ["--socket", daemon.socket]
        assert main(["quota", "calm=16MiB:8MiB", *at]) == 0
        assert capsys.readouterr().out == "calm=16MiB:8MiB\n"
        one.tenant = "calm"
        assert sum(map(one.store, CALM)) == 32
        noise(one, 0)
        assert calm(one) == 32
        assert main(["status", *at]) == 0
        line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("calm "))
        assert " ".join(line.split()) == "calm 8.0 MiB 16.0 MiB 8.0 MiB 100.0 % 100.0 %"
        assert main(["quota", "--remove", "calm", *at]) == 0
        noise(one, 64)
        assert calm(one) == 0
        assert main(["quota", "calm=1MiB:2MiB", *at]) == 2
        assert "the cap 1MiB is below what is reserved, 2MiB" in capsys.readouterr().err
        assert main(["quota", "calm=:64MiB", *at]) == 1
        assert "L1 has 33554432" in capsys.readouterr().err
        assert main(["quota", *at]) == 2


def test_quotas_that_cannot_be_stop_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    for quotas, why in (
        (["a=1MiB:2MiB"], "the cap 1MiB is below what is reserved, 2MiB"),
        (["a=:12MiB", "b=:12MiB"], "24MiB are reserved of an l1_size of 16MiB"),
        (["a=1MiB", "a=2MiB"], "a has two"),
        (["a"], "write NAME=CAP:RESERVED"),
        (["a=lots"], "no size: 'lots'"),
        (["other=1MiB"], "not 'other'"),
        (["b=:0", OF_TIER], "quota of a: it has none in L1: add --quota a=:0"),
    ):
        flags = [x for q in quotas for x in ("--tier" if q == OF_TIER else "--quota", q)]
        assert main(["serve", "--socket", "/nowhere/s", "--l1-size", "16MiB", *flags]) == 2
        said = capsys.readouterr().err
        assert why in said
        assert said.count("\n") == 1
