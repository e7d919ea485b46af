"""The program that fills a tier of full size, on a small one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import disk_capacity
from kvass.tiers.disk import index


def test_it_says_what_it_saw(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.disk_capacity", "--rows=3000", f"--in={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    told = json.loads(done.stdout)
    assert told["stored"] == 9000
    assert told["records"] >= 3000
    assert told["records_found"] == told["records"]
    assert told["bytes_over"] == told["wrong"] == told["missed"] == 0
    assert told["looks"] > 9
    assert told["bytes_most"] > 0.9 * told["capacity_bytes"]
    assert (done.returncode == 0) == (done.stderr == "")
    assert list(tmp_path.iterdir()) == []


def test_it_sees_a_cap_that_is_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "disk_bytes", lambda slot_bytes, slots: slot_bytes * slots // 2)
    told = disk_capacity.measure(tmp_path, 1000)
    assert told["bytes_over"] > 0
    assert any("bytes_over" in line for line in disk_capacity.worse(told))


def test_it_sees_rows_that_are_not_what_was_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_capacity, "_key", lambda number: b"row %d" % (number // 2 * 2))
    told = disk_capacity.measure(tmp_path, 1000)
    assert told["wrong"] > 0
