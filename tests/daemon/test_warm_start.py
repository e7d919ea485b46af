"""A daemon with a full disk tier fills L1 by itself, once an engine has registered."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvass.core.effects import Recalled, Records, Remembered, TierRecall, TierRemember
from kvass.testing.daemon import Daemon, running_daemon
from tests.daemon.tier_rig import PAGE, SPACE, commit_two, disk, rig, tier_of
from tests.support.tiers.memory import MemoryTier
from tests.support.waiting import eventually
from tests.support.wire.raw_session import engine


def records_of(count: int, group: int = 0) -> Records:
    keys = np.arange(1, 4 * count + 1, dtype=np.uint64).reshape(count, 4)
    return Records(SPACE, 7, group, keys)


@pytest.mark.parametrize("shard_bytes", [(PAGE,), (PAGE, 2 * PAGE), (PAGE, 0)])
def test_a_list_comes_back_in_its_order(shard_bytes: tuple[int, ...]) -> None:
    most = sum(shard_bytes) // 32
    with rig(MemoryTier()) as made:
        for op, count in enumerate((3, most), 1):
            kept = records_of(count)
            assert made.ask(TierRemember(0, op, kept, shard_bytes)) == Remembered(op, True)
            end = made.ask(TierRecall(0, op, records_of(0), shard_bytes))
            assert type(end) is Recalled
            assert (end.keys == kept.keys).all()
        other = made.ask(TierRecall(0, 9, records_of(0, group=1), shard_bytes))
        assert len(other.keys) == 0


def warm_rows(daemon: Daemon) -> int:
    return int(daemon.status()["counters"]["warm_start_rows"])


@pytest.mark.parametrize("encrypted", [False, True])
def test_after_a_restart_the_rows_are_in_l1_before_any_lookup(
    tmp_path: Path, folder: Path, encrypted: bool
) -> None:
    where = disk(folder)
    if encrypted:
        pytest.importorskip("cryptography")
        file = tmp_path / "keys"
        file.write_text("ab" * 32)
        file.chmod(0o600)
        where += f"&key_file={file}"
    with running_daemon(tmp_path, tier=[where], warm_start="0.5") as daemon:
        with engine(daemon.socket) as peers:
            commit_two(*peers)
            assert eventually(lambda: tier_of(daemon)["records"] == 2)
        assert daemon.stop() == 0
        daemon.start()
        assert daemon.status()["rows"] == 0
        with engine(daemon.socket):
            assert eventually(lambda: daemon.status()["rows"] == 2)
            assert warm_rows(daemon) == 2
            assert eventually(lambda: tier_of(daemon)["records"] == 3), "two rows and a list"
            assert daemon.status()["warm_start_planned_bytes"] == 0


def test_a_killed_daemon_has_left_what_it_last_told(tmp_path: Path, folder: Path) -> None:
    """Control of the test above: it was killed before it told anything, so L1 stays empty."""
    with running_daemon(tmp_path, tier=[disk(folder)], warm_start="0.5") as daemon:
        with engine(daemon.socket) as peers:
            commit_two(*peers)
            assert eventually(lambda: tier_of(daemon)["records"] == 2)
        daemon.kill()
        daemon.start()
        with engine(daemon.socket):
            assert eventually(lambda: tier_of(daemon).get("records") == 2)
            assert (daemon.status()["rows"], warm_rows(daemon)) == (0, 0)
