"""Reserved huge pages: counted, mapped by several processes, served from, and refused in time."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvass import config
from kvass.arena import memory
from kvass.arena.huge import Pool, lacking, page_bytes, pool
from kvass.arena.room import physical_bytes
from kvass.client.parallel import ParallelStrategy
from kvass.config import load
from kvass.errors import ConfigError, UsageError
from kvass.testing.daemon import running_daemon
from kvass.testing.fake_engine import FakeEngine, spread
from kvass.types import PAGE as SMALL
from kvass.types import Size
from tests.client.test_fake_engine import MODEL, PROMPT
from tests.client.test_tiers import flushed, loaded
from tests.support import waiting
from tests.support.huge_pages import PAGE, reserved

MIB = 1 << 20


def machine(root: Path, **numbers: int) -> Path:
    """A machine with these files of its pages of 2 MiB."""
    folder = root / "sys/kernel/mm/hugepages/hugepages-2048kB"
    folder.mkdir(parents=True)
    for name, number in numbers.items():
        (folder / f"{name}_hugepages").write_text(f"{number}\n")
    return root


def test_pages_that_others_were_promised_are_not_free(tmp_path: Path) -> None:
    root = machine(tmp_path, nr=100, free=60, resv=20)
    assert pool(PAGE, root) == Pool(100, 40)
    assert lacking(PAGE, 80 * MIB, root) == ""
    assert lacking(PAGE, 82 * MIB, root) == (
        "of 41 pages of 2MiB only 40 are free: as root, "
        "echo 101 > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"
    )


def test_what_is_not_known_is_not_there(tmp_path: Path) -> None:
    assert pool(PAGE, tmp_path) == Pool(0, 0)
    assert lacking(1 << 30, 3 << 30, tmp_path).endswith("or at boot: hugepagesz=1G hugepages=3")


def test_the_option_names_a_size() -> None:
    assert page_bytes("transparent") == SMALL
    assert page_bytes("2MiB") == PAGE
    assert page_bytes("1GiB") == 1 << 30


def test_an_arena_has_whole_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="multiple of 2097152"):
        memory.create(3 * MIB, PAGE)
    with pytest.raises(ConfigError, match="l1-size 1MiB: smaller than a page of 2MiB; use 2MiB"):
        load({"l1_size": "1MiB", "huge_pages": "2MiB"}, {})
    monkeypatch.setattr(config, "memory_bytes", lambda: MIB)  # a container's limit
    assert load({"l1_size": "2MiB", "huge_pages": "2MiB"}, {}).huge_pages == "2MiB"
    with pytest.raises(ConfigError, match="more than the 1MiB"):
        load({"l1_size": "2MiB"}, {})


def test_more_than_is_reserved_is_an_error_at_once_not_at_the_first_touch() -> None:
    with pytest.raises(OSError, match="allocate") as failed:
        memory.create(pool(PAGE).free * PAGE + (64 << 30), PAGE)
    assert failed.value.errno == errno.ENOMEM


def test_processes_share_its_pages_and_give_them_back() -> None:
    with reserved(16):
        free, arena = pool(PAGE).free, memory.create(16 * PAGE, PAGE)
        assert arena.page_bytes == PAGE
        assert pool(PAGE).free == free - 16  # promised, though none was touched
        assert not arena.advise_huge()
        arena.populate(PAGE - SMALL, 2 * PAGE + 1)  # the pages 0, 1 and 2
        assert os.fstat(arena.fileno()).st_blocks * 512 == 3 * PAGE
        child = (
            "import sys; from kvass.arena import memory;"
            f"a = memory.attach({arena.fileno()}, {16 * PAGE});"
            f"assert a.has_page({3 * PAGE - SMALL}) and not a.has_page({3 * PAGE});"
            "a.buffer[5] = 7; a.populate(0, a.size); a.keep_from_forks(); a.close()"
        )
        fds = [arena.fileno()]
        subprocess.run([sys.executable, "-c", child], pass_fds=fds, check=True, timeout=60)
        assert arena.buffer[5] == 7
        assert arena.has_page(15 * PAGE)
        lines = re.findall(r".*kvass-arena.*", Path("/proc/self/numa_maps").read_text())
        assert any("kernelpagesize_kB=2048" in line for line in lines)
        arena.close()
        assert pool(PAGE).free == free


def test_an_attached_arena_closes_its_descriptor() -> None:
    with reserved(1):
        arena = memory.create(PAGE, PAGE)
        second = memory.attach(fd := os.dup(arena.fileno()), PAGE)
        assert second.fileno() == -1
        second.close()
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(fd)
        arena.close()


def test_a_view_keeps_its_bytes() -> None:
    with reserved(2):
        arena = memory.create(2 * PAGE, PAGE)
        arena.buffer[:] = 9
        view = arena.buffer[PAGE - 5 : PAGE + 5]
        arena.close()
        assert np.all(view == 9)
        del view


def test_a_daemon_and_its_tier_serve_from_them(tmp_path: Path) -> None:
    """What was stored is found in L1, and in the tier by the next daemon. Its tier's process has
    mapped all pages ahead."""
    (tmp_path / "disk").mkdir()
    tier = f"disk:{tmp_path}/disk?capacity=64MiB"
    world = ParallelStrategy(tp=2)
    with (
        reserved(16),
        running_daemon(tmp_path, "33MiB", huge_pages="2MiB", tier=tier) as daemon,
    ):
        for _ in range(2):
            assert "l1=32MiB l1_bytes=33554432 pages=2MiB" in daemon.ready
            layout = spread(world, MODEL)
            with FakeEngine(daemon.socket, world, layout, identity={"model": "m"}) as engine:
                engine.store(PROMPT)
                assert loaded(engine, PROMPT) == 4
            flushed(daemon)
            daemon.wait_until(l1_populated_bytes=32 * MIB)
            assert waiting.eventually(lambda: mapped(daemon.pid) == [16, 16])
            assert daemon.stop() == 0
            daemon.start()
        with FakeEngine(daemon.socket, world, layout, identity={"model": "m"}) as engine:
            assert loaded(engine, PROMPT) == 4


def mapped(pid: int) -> list[int]:
    """How many huge pages the process and each of its children have mapped."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    maps = [Path(f"/proc/{one}/numa_maps").read_text() for one in (pid, *children)]
    return [
        sum(map(int, re.findall(r" N\d+=(\d+)", line)))
        for text in maps
        for line in re.findall(r".*kvass-arena.*", text)
    ]


def test_a_daemon_that_cannot_have_them_says_how_to_reserve(tmp_path: Path) -> None:
    size = Size(physical_bytes() >> 30 << 30)
    with (
        pytest.raises(RuntimeError, match=r"of \d+ pages of 2MiB only \d+ are free: as root, echo"),
        running_daemon(tmp_path, str(size), huge_pages="2MiB"),
    ):
        pass
