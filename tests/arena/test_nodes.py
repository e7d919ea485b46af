"""NUMA nodes: read from files, named by the user, and given to the kernel, which shows them.

This machine may have one node. What several do with a policy is the kernel's, and not proven here.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvass.arena import memory, nodes
from kvass.daemon import main
from kvass.daemon.notices import Notices
from kvass.errors import ConfigError
from kvass.types import PAGE
from tests.support import huge_pages

MIB = 1 << 20


def machine(root: Path, cpus: dict[int, str], has_memory: str, allowed: str = "") -> Path:
    folder = root / "sys/devices/system/node"
    for node, text in cpus.items():
        (folder / f"node{node}").mkdir(parents=True)
        (folder / f"node{node}/cpulist").write_text(text + "\n")
    (folder / "has_memory").write_text(has_memory + "\n")
    if allowed:
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/status").write_text(f"Name: x\nMems_allowed_list:\t{allowed}\n")
    return root


@pytest.fixture
def arena() -> Iterator[memory.Arena]:
    one = memory.create(4 * MIB)
    yield one
    one.close()


def mapping(of: memory.Arena) -> str:
    """The line of numa_maps."""
    inode, start = os.fstat(of.fileno()).st_ino, f"{of.buffer.ctypes.data:x}"
    assert f"{start}-" in Path("/proc/self/maps").read_text(), inode
    (line,) = re.findall(rf"^0*{start} .*$", Path("/proc/self/numa_maps").read_text(), re.M)
    return str(line)


def policy_calls(of: memory.Arena, where: set[int]) -> None:
    try:
        nodes.place(of, where)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOSYS):
            pytest.skip(f"no policies here: {error}")
        raise


def test_nodes_with_memory_that_may_be_used(tmp_path: Path) -> None:
    root = machine(tmp_path, {0: "0-3,8", 1: "4-7", 2: "", 5: "9"}, "0-2,5", "0,2-5")
    assert nodes.nodes(root) == {0: {0, 1, 2, 3, 8}, 2: set(), 5: {9}}


def test_a_kernel_without_nodes_has_one(tmp_path: Path) -> None:
    assert nodes.nodes(tmp_path) == {0: set()}


def test_this_machine_has_nodes_with_all_of_our_cpus() -> None:
    assert set().union(*nodes.nodes().values()) >= os.sched_getaffinity(0)


@pytest.mark.parametrize("text", ["a", "1-", "3-1", "-1", "0-999999999999", "1;2"])
def test_what_is_no_list_of_nodes(text: str, arena: memory.Arena) -> None:
    with pytest.raises(ValueError, match=r"."):
        nodes.numbers(text)
    with pytest.raises(ConfigError, match="give numbers of nodes"):
        main._spread(arena, text, Notices())


def test_the_kernel_knows_the_policy_in_every_process(arena: memory.Arena) -> None:
    """It belongs to the shared memory. The control: before, there is none."""
    first = min(nodes.nodes())
    assert " default " in mapping(arena)
    policy_calls(arena, {first})
    assert f" prefer:{first} " in mapping(arena)
    arena.populate(0, arena.size)
    assert re.search(rf" N{first}=\d+", mapping(arena))
    child = (
        "import re; from pathlib import Path; from kvass.arena import memory;"
        f"a = memory.attach({arena.fileno()}, {arena.size}); a.buffer[0];"
        f"assert 'prefer:{first} ' in Path('/proc/self/numa_maps').read_text()"
    )
    fds = [arena.fileno()]
    subprocess.run([sys.executable, "-c", child], pass_fds=fds, check=True, timeout=60)


def test_several_nodes_are_interleaved(
    arena: memory.Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one node the kernel takes the policy, too, and shows it."""
    monkeypatch.setattr(nodes, "_PREFERRED", nodes._INTERLEAVE)
    first = min(nodes.nodes())
    policy_calls(arena, {first})
    assert f" interleave:{first} " in mapping(arena)


def test_the_mask_and_the_mode_of_many_nodes(
    arena: memory.Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[tuple[object, ...]]()
    monkeypatch.setattr(nodes, "_call", lambda *call: calls.append(call))
    nodes.place(arena, {1, 3, 64})
    ((number, address, size, mode, bits, most, _),) = calls
    assert number == nodes._MBIND
    assert [each.value for each in (address, size, mode, most)] == [  # type: ignore[attr-defined]
        *(arena.buffer.ctypes.data, arena.size, 3, 128)
    ]
    assert [*bits] == [0b1010, 1]  # type: ignore[misc]


def test_the_sample_agrees_with_numa_maps(arena: memory.Arena) -> None:
    assert nodes.by_node(arena) == {}  # nothing is there
    arena.populate(0, 2 * MIB)
    if not (sampled := nodes.by_node(arena)):
        pytest.skip("no move_pages here")
    counted = {int(n): int(p) * PAGE for n, p in re.findall(r" N(\d+)=(\d+)", mapping(arena))}
    assert sampled == counted  # so few pages are all looked at
    arena.populate(0, arena.size)
    assert sum(nodes.by_node(arena).values()) == arena.size


def test_the_sample_of_huge_pages() -> None:
    with huge_pages.reserved(4):
        arena = memory.create(4 * huge_pages.PAGE, huge_pages.PAGE)
        arena.populate(0, arena.size)
        found = nodes.by_node(arena)
        assert not found or sum(found.values()) == arena.size
        arena.close()


def test_one_node_needs_no_call(arena: memory.Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "nodes", lambda: {0: {0, 1}})
    main._spread(arena, "", Notices())
    assert " default " in mapping(arena)


def test_a_refused_policy_is_told(
    arena: memory.Arena, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The default goes on without it; what the user named does not."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(nodes, "nodes", lambda: {0: {0}, 1: {1}})
    monkeypatch.setattr(nodes, "_call", refuse)
    with caplog.at_level(logging.WARNING):
        main._spread(arena, "", notices := Notices())
    (note,) = notices.fields()["notes"]
    assert "not spread evenly over the 2 NUMA nodes: mbind: Operation not" in note
    assert note in caplog.text
    with pytest.raises(ConfigError, match=r"numa 1: mbind: .*SYS_NICE"):
        main._spread(arena, "1", Notices())
    with pytest.raises(ConfigError, match="numa 0,2: the nodes with memory here are 0, 1"):
        main._spread(arena, "0,2", Notices())
    assert nodes.by_node(arena) == {}
