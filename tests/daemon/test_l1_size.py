"""L1 is no larger than the memory that is there, unless somebody forces it."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvass.arena import room
from kvass.config import Config, Size
from kvass.daemon import l1_size as module
from kvass.daemon.l1_size import l1_size
from kvass.errors import ConfigError
from kvass.testing.daemon import running_daemon
from tests.daemon.test_process import refused, serve

GIB = 1 << 30
GROUP = "sys/fs/cgroup/daemon"


class Memory:
    """The files of a machine with 64 GiB, in which 10 GiB are available."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.says(available=10 * GIB)

    def write(self, name: str, text: str) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(text)

    def says(self, available: int, shared: int = 0) -> None:
        kib = {"MemTotal": 64 * GIB, "MemAvailable": available, "Shmem": shared}
        lines = (f"{name}: {size >> 10} kB\n" for name, size in kib.items())
        self.write("proc/meminfo", "".join(lines))

    def limited(self, limit: int, used: int, **stat: int) -> None:
        self.write("proc/self/cgroup", "0::/daemon\n")
        self.write(f"{GROUP}/memory.max", f"{limit}\n")
        self.write(f"{GROUP}/memory.current", f"{used}\n")
        self.write(f"{GROUP}/memory.stat", "".join(f"{n} {size}\n" for n, size in stat.items()))

    def gives(self, size: str, **options: object) -> str:
        """The size of L1 in GiB, and the beginning of what is said of it."""
        config = Config(l1_size=Size.parse(size), **options)  # type: ignore[arg-type]
        got = l1_size(config, root=self.root)
        return f"{got.bytes / GIB:g} {got.note}".strip()


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Memory:
    monkeypatch.setattr(module, "default_l1_size", lambda: Size(16 * GIB))
    return Memory(tmp_path)


def test_more_than_is_available_is_refused_unless_it_is_forced(memory: Memory) -> None:
    assert memory.gives("8GiB") == "8"
    assert memory.gives("9GiB").startswith(
        "9 l1_size 9GiB takes 90% of the 10GiB of memory available at the start: the daemon"
    )
    with pytest.raises(ConfigError) as caught:
        memory.gives("22GiB")
    assert str(caught.value) == (
        "l1_size 22GiB: there are 10GiB of memory available, and the kernel would kill a process: "
        "give 8GiB or less, free memory, or say --force-l1-size yes"
    )
    assert memory.gives("22GiB", force_l1_size=True).startswith(
        "22 l1_size 22GiB takes 220% of the 10GiB of memory available at the start: "
    )
    assert memory.gives("8GiB", force_l1_size=True) == "8"


@pytest.mark.parametrize("left", [0, 1 << 19, (128 << 20) + (1 << 19)])
def test_where_nearly_no_memory_is_available_none_is_taken_unless_it_is_forced(
    memory: Memory, left: int
) -> None:
    memory.limited(8 * GIB, 8 * GIB - left)
    for size in ("16GiB", "8GiB"):  # the default, and another
        with pytest.raises(ConfigError) as caught:
            memory.gives(size)
        assert str(caught.value) == (
            f"l1_size {size}: there are {Size(left).rounded()} of memory available, and the kernel "
            "would kill a process: free memory, or say --force-l1-size yes"
        )
    assert memory.gives("8GiB", force_l1_size=True).startswith("8 l1_size 8GiB takes ")


def test_a_default_that_is_not_available_becomes_smaller(memory: Memory) -> None:
    assert memory.gives("16GiB") == (
        "8 L1 has 8GiB: its default, 16GiB, is more than the 10GiB of memory available at the start"
    )
    memory.says(available=17 * GIB)
    assert memory.gives("16GiB").startswith("16 l1_size 16GiB takes 94% of")
    memory.says(available=10 * GIB)
    with pytest.raises(ConfigError, match="9GiB are reserved of an l1_size of 8GiB"):
        memory.gives("16GiB", quota=["a=:9GiB"])


def test_a_cgroup_counts_and_its_page_cache_does_not(memory: Memory) -> None:
    memory.limited(8 * GIB, 5 * GIB, inactive_file=GIB, active_file=2 * GIB, shmem=0)
    assert memory.gives("4GiB") == "4"
    with pytest.raises(ConfigError, match="there are 6GiB of memory available"):
        memory.gives("7GiB")
    memory.says(available=60 * GIB)
    memory.limited(9 * GIB, 0)  # as deploy/compose.yml
    assert memory.gives("8GiB") == "8"
    assert "l1_size 9100MiB takes 99% of the 9GiB" in memory.gives("9100MiB")
    memory.says(available=10 * GIB)
    memory.limited(128 * GIB, 127 * GIB)
    assert memory.gives("8GiB") == "8", "a limit above what the machine has is none"


def test_what_is_not_known_or_not_of_this_memory_is_not_refused(memory: Memory) -> None:
    assert memory.gives("22GiB", huge_pages="2MiB") == "22", "they are reserved"
    assert memory.gives(f"{(9 << 20) + 1}", huge_pages="2MiB") == f"{8 / 1024:g}"
    memory.write("proc/meminfo", "")
    assert memory.gives("22GiB") == "22"


def test_what_its_folder_has_already_is_not_wanted_again(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart with the same options must succeed."""
    monkeypatch.setattr(module, "held_bytes", {"": 0, "/a": 14 * GIB}.__getitem__)
    assert memory.gives("22GiB", arena="/a") == "22"
    assert memory.gives("12GiB", arena="/a") == "12"
    assert memory.gives("24GiB", arena="/a").startswith(
        "24 l1_size 24GiB takes 100% of the 10GiB of memory available beside the 14GiB that "
        "it has in /a at the start"
    )
    with pytest.raises(ConfigError, match=r"beside the 14GiB that .* give 22GiB or less"):
        memory.gives("25GiB", arena="/a")
    with pytest.raises(ConfigError):
        memory.gives("22GiB")  # the control


def test_memory_that_engines_have_of_a_former_l1_is_waited_for(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They unmap it when they see that its daemon has ended."""
    slept, clock = list[float](), [0.0]

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock[0] += seconds
        if len(slept) == 30:
            memory.says(available=22 * GIB)

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    memory.says(available=10 * GIB, shared=11 * GIB)
    assert memory.gives("20GiB").startswith("20 l1_size 20GiB takes 91% of the 22GiB")
    assert len(slept) == 30
    memory.says(available=10 * GIB, shared=9 * GIB)
    with pytest.raises(ConfigError):
        memory.gives("20GiB")
    assert len(slept) == 30, "that would not be enough, whoever has it"
    memory.says(available=10 * GIB, shared=11 * GIB)
    with pytest.raises(ConfigError):
        memory.gives("20GiB")
    assert sum(slept[30:]) == pytest.approx(15, abs=0.2), "somebody else's"


def test_an_arena_that_the_kernel_does_not_promise_is_refused(memory: Memory) -> None:
    """With strict overcommit; without, a promise costs nothing."""
    memory.write("proc/meminfo", "CommitLimit: 1048576 kB\nCommitted_AS: 524288 kB\n")
    memory.write("proc/sys/vm/overcommit_memory", "0\n")
    assert room.committable(memory.root) is None
    memory.write("proc/sys/vm/overcommit_memory", "2\n")
    assert room.committable(memory.root) == 512 << 20
    assert memory.gives("512MiB") == "0.5"
    with pytest.raises(ConfigError, match=r"l1_size 513MiB: the kernel promises 512MiB more"):
        memory.gives("513MiB", force_l1_size=True)


# ---------------------------------------------------------------- daemons


LITTLE = (
    "import sys; from pathlib import Path; from kvass.daemon import l1_size; "
    "real, root = l1_size.room, Path(sys.argv.pop(1)); l1_size.room = lambda _: real(root); "
    "from kvass.cli.main import main; sys.exit(main())"
)
"""A daemon that reads how much memory there is in another folder."""


@pytest.fixture
def little(memory: Memory) -> list[str]:
    """The command of a daemon where 40 MiB are available."""
    memory.says(available=40 << 20)
    return [sys.executable, "-c", LITTLE, str(memory.root)]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_daemon_refuses_in_one_line_and_touches_nothing(
    tmp_path: Path, little: list[str]
) -> None:
    flags = ["serve", "--socket", str(tmp_path / "s"), "--l1-size", "64MiB"]
    line = refused(run([*little, *flags]))
    assert "there are 40MiB of memory available" in line
    assert line.endswith("or say --force-l1-size yes")
    assert not (tmp_path / "s").exists()
    with running_daemon(tmp_path) as daemon:
        flags[2] = daemon.socket
        said = refused(run([*little, *flags]))
        assert f"in use by the live daemon {daemon.pid}" in said, "it has the memory"


def test_a_forced_daemon_serves_and_its_status_says_it(tmp_path: Path, memory: Memory) -> None:
    memory.says(available=40 << 20)
    program = ("-c", LITTLE, str(memory.root))
    with running_daemon(tmp_path, program=program, force_l1_size="yes") as daemon:
        (note,) = daemon.status()["notes"]
        assert note.startswith("l1_size 64MiB takes 160% of the 40MiB of memory available")
        assert note in daemon.log()


def test_a_second_daemon_is_told_of_the_first_one_and_not_of_its_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with running_daemon(tmp_path, http=address) as daemon:
        flags = ("--l1-size", "1MiB", "--http", address, "--socket")
        line = refused(serve(*flags, daemon.socket))
        assert f"is in use by the live daemon {daemon.pid}" in line
        assert "Address already in use" in refused(serve(*flags, str(tmp_path / "other")))
