"""``kvass serve --arena`` with a folder of hugetlbfs. Each test runs in a mount namespace."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvass.arena.huge import pool
from tests.support.huge_pages import PAGE, reserved

ROOT = Path(__file__).parents[2]
BEGIN = """
import sys
from contextlib import ExitStack
from pathlib import Path
from bench.rows import Rows
from kvass.cli.main import main
from kvass.testing.daemon import running_daemon
from tests.daemon.test_lasting import KEYS, ROW, found, of_arena
from tests.daemon.test_process import refused, serve

folder, place = Path(sys.argv[1]), sys.argv[1] + "/huge/kvass"
flags = ("--socket", str(folder / "other"), "--arena", place, "--l1-size")

def mine(daemon, ending):
    return Rows(daemon.socket, "mine", ROW, ending)
"""


def in_namespace(folder: Path, script: str, options: str = "") -> None:
    """Run ``script`` where ``folder/huge`` is a hugetlbfs with pages of 2 MiB."""
    if os.geteuid() or not shutil.which("unshare"):
        pytest.skip("only root can mount")
    (folder / "huge").mkdir()
    mount = f"mount -t hugetlbfs -o pagesize=2M,mode=700{options} none {folder}/huge"
    run = f'{mount} && exec {sys.executable} -c "$0" {folder}'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", run, BEGIN + script],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr


def test_rows_outlive_the_daemon(tmp_path: Path) -> None:
    with reserved(20):
        in_namespace(
            tmp_path,
            """
with running_daemon(folder, "17MiB", arena=place) as daemon:
    assert " l1_bytes=16777216 pages=2MiB " in daemon.ready
    with ExitStack() as engine:
        mine(daemon, engine).store(KEYS)
    for end in (daemon.kill, daemon.stop):
        end()
        daemon.start()
        assert of_arena(daemon)["started_empty"] == ""
        with ExitStack() as engine:
            assert found(mine(daemon, engine)) == 12
    assert "in use by process ?" in refused(serve(*flags, "16MiB"))
    daemon.stop()
    assert main(["clear", "--arena", place]) == 0
    daemon.start()
    assert of_arena(daemon)["started_empty"] == "it is new"
""",
        )


def test_what_cannot_be_served_is_one_line(tmp_path: Path) -> None:
    with reserved(1):
        some = pool(PAGE).free
        in_namespace(
            tmp_path,
            f"""
assert " pages of 2MiB only " in refused(serve(*flags, "{(some + 60) * PAGE}"))
assert "smaller than a page of 2MiB" in refused(serve(*flags, "1MiB"))
assert "not with arena" in refused(serve(*flags, "1GiB", "--huge-pages", "1GiB"))
""",
        )


def test_without_a_page_for_the_index_it_is_refused(tmp_path: Path) -> None:
    """Also after a daemon that ended before there was one: nobody touches what cannot be had."""
    with reserved(20):
        in_namespace(
            tmp_path,
            """
for _ in range(2):
    why = refused(serve(*flags, "16MiB"))
    assert why.endswith("there is no memory for the index: reserve some pages more than L1 has")
main(["clear", "--arena", place])
with running_daemon(folder, "8MiB", arena=place) as daemon:
    assert of_arena(daemon)["started_empty"] == "it is new"
""",
            ",size=16M",
        )
