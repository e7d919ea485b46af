"""The program that fills a tier of full size, on a small one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


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
