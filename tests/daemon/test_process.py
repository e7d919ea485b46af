"""The daemon as a process: its start, its socket, its memory, its end."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvass.cli.main import main
from kvass.client.client import Client
from kvass.config import Config, Size
from kvass.daemon.listen import Access, listening
from kvass.daemon.notices import Notices
from kvass.errors import Unavailable
from kvass.messages import Error, Ping, Pong, Populated
from kvass.testing.daemon import Daemon, running_daemon
from kvass.wire import framing
from kvass.wire.channel import Channel
from tests.support.waiting import eventually
from tests.support.wire.raw_session import RawSession

MIB = 1 << 20


def serve(*flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``kvass serve`` to its end."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("KVASS_")}
    return subprocess.run(
        [sys.executable, "-m", "kvass", "serve", *flags],
        capture_output=True,
        text=True,
        env={**clean, **env},
        timeout=60,
    )


def refused(result: subprocess.CompletedProcess[str]) -> str:
    """The one line that a start refused with."""
    assert (result.returncode, result.stdout) == (2, ""), result
    (line,) = result.stderr.splitlines()
    return line


def as_user(uid: int, groups: list[int], work: Callable[[], None]) -> int:
    """Run ``work`` in a forked child of another user; its exit status (0: no exception)."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setgroups(groups)
            os.setgid(uid)
            os.setuid(uid)
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# ---------------------------------------------------------------- start and end


def test_ready_line_tells_socket_sizes_and_pages(shared: Daemon) -> None:
    assert re.fullmatch(
        rf"ready socket={shared.socket} l1=64MiB l1_bytes={64 * MIB} pages=(4KiB|huge)"
        r" boot=[0-9a-f]{32}",
        shared.ready,
    )
    assert stat.S_IMODE(os.stat(shared.socket).st_mode) == 0o600


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_stop_it_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    with running_daemon(tmp_path) as daemon, RawSession(daemon.socket).greet() as peer:
        os.kill(daemon.pid, number)
        assert daemon.wait() == 0
        with pytest.raises(Unavailable):
            peer.next()
        assert os.listdir(tmp_path) == ["daemon.log"]
        (line,) = daemon.log().splitlines()
        assert line.endswith("INFO stopping; 0 rows are left to flush")


@pytest.mark.parametrize("output", ["pipe without a reader", "full disk"])
def test_it_serves_though_its_ready_line_cannot_be_written(tmp_path: Path, output: str) -> None:
    if output == "full disk":
        writing = os.open("/dev/full", os.O_WRONLY)
    else:
        reading, writing = os.pipe()
        os.close(reading)
    program = Path(sys.executable).with_name("kvass")  # as users start it
    command = [str(program), "serve", "--socket", str(tmp_path / "s"), "--l1-size", "1MiB"]
    with subprocess.Popen(command, stdout=writing, stderr=subprocess.PIPE, text=True) as daemon:
        try:
            os.close(writing)
            assert daemon.stderr is not None
            assert re.search("standard output: .*; the line was: ready", daemon.stderr.readline())
            with Client(str(tmp_path / "s")) as client:
                assert client.status()["instances"] == 0
            daemon.terminate()
            assert daemon.wait(10) == 0
            assert daemon.stderr.read().endswith("0 rows are left to flush\n")
        finally:
            daemon.kill()


def test_live_daemon_is_refused_and_a_killed_one_taken_over(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as daemon:
        line = refused(serve("--socket", daemon.socket, "--l1-size", "1MiB"))
        assert f"in use by the live daemon {daemon.pid}" in line
        daemon.suspend()
        assert "in use" in refused(serve("--socket", daemon.socket, "--l1-size", "1MiB"))
        daemon.resume()
        boot = daemon.status()["boot"]
        daemon.kill()
        assert os.path.exists(daemon.socket)
        daemon.start()
        assert daemon.status()["boot"] != boot


def test_of_many_that_start_at_once_one_serves(tmp_path: Path) -> None:
    flags = ("--socket", str(tmp_path / "s"), "--l1-size", "1MiB")
    (tmp_path / "s.lock").write_text("left behind by a dead one")
    results: list[subprocess.CompletedProcess[str]] = []
    starts = [threading.Thread(target=lambda: results.append(serve(*flags))) for _ in range(4)]
    for start in starts:
        start.start()
    while len(results) < 3:
        time.sleep(0.05)
    with Client(str(tmp_path / "s")) as client:
        client.start()
        assert eventually(lambda: client.connected), "the one that was first may still be at it"
    os.kill(int((tmp_path / "s.lock").read_text()), signal.SIGTERM)
    for start in starts:
        start.join()
    assert sorted(r.returncode for r in results) == [0, 2, 2, 2]


def test_socket_path_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    flags = ("--l1-size", "1MiB", "--socket")
    assert "is no socket" in refused(serve(*flags, str(tmp_path / "file")))
    assert (tmp_path / "file").read_text() == "precious"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "other"))
        other.listen()
        assert "another program" in refused(serve(*flags, str(tmp_path / "other")))


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--l1-size", "12"), "smaller than one row"),
        (("--l1-size", "900TiB"), "more than the"),
        (("--l1-size", "much"), "no size: 'much'; write it like 8GiB"),
        (("--socket", "/tmp/" + "x" * 120), "107 bytes"),
        (("--no-such-flag",), "unrecognized arguments: --no-such-flag; see kvass serve --help"),
        (("--allow-uid", "no-such-user"), "--allow-uid: there is no user 'no-such-user' here"),
    ],
)
def test_bad_options_get_one_clear_line(
    tmp_path: Path, flags: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = ("--socket", str(tmp_path / "s"), "--l1-size", "1MiB")
    assert main(["serve", "--print-config", *usual, *flags]) == 2  # that flag: never a daemon here
    (said,) = capsys.readouterr().err.splitlines()
    assert line in said
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--socket", "/no/such/folder/s"), "no folder /no/such/folder"),
        (("--socket-group", "nobody-has-this"), "no such group"),
    ],
)
def test_what_a_daemon_cannot_have_is_one_clear_line(
    tmp_path: Path, flags: tuple[str, ...], line: str
) -> None:
    usual = ("--socket", str(tmp_path / "s"), "--l1-size", "1MiB")
    assert line in refused(serve(*usual, *flags))
    assert os.listdir(tmp_path) == []


def test_bad_environment_gets_one_clear_line(tmp_path: Path) -> None:
    line = refused(serve("--socket", str(tmp_path / "s"), KVASS_L1_SIZ="1MiB"))
    assert "unknown option 'KVASS_L1_SIZ' in the environment; did you mean KVASS_L1_SIZE?" in line


IN_FOLDER = (
    "import sys; from kvass.wire import places; places.SERVICE_FOLDER = sys.argv.pop(1); "
    "from kvass.cli.main import main; main()"
)


@pytest.mark.parametrize(("place", "mode"), [("run/kvass", 0o755), ("absent/kvass", 0o700)])
def test_the_default_socket_is_in_a_folder_that_only_this_user_can_write_to(
    tmp_path: Path, place: str, mode: int
) -> None:
    """In the folder of services, or in the temporary folder if that cannot be made."""
    env = {k: v for k, v in os.environ.items() if k != "XDG_RUNTIME_DIR"}
    env["TMPDIR"] = str(tmp_path)
    (tmp_path / "run").mkdir()
    folder = tmp_path / (place if mode == 0o755 else f"kvass-{os.geteuid()}")
    arguments = [str(tmp_path / place), "serve", "--l1-size", "1MiB"]
    with subprocess.Popen(
        [sys.executable, "-c", IN_FOLDER, *arguments], stdout=subprocess.PIPE, env=env
    ) as process:
        assert process.stdout is not None
        assert f"ready socket={folder}/kvass.sock" in process.stdout.readline().decode()
        assert stat.S_IMODE(folder.stat().st_mode) == mode
        with RawSession(str(folder / "kvass.sock")).greet():
            pass
        process.terminate()


@pytest.mark.parametrize("told", [True, False])
def test_a_daemon_for_others_in_a_folder_of_others_says_that_they_will_refuse_it(
    told: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 54_321)
    config = Config(socket=str(tmp_path / "s"), l1_size=Size(MIB), allow_uid=[0] if told else [])
    notices = Notices()
    with listening(config.socket, access := Access(config)):
        access.look_at(config.socket, notices)
    assert ("set kvass.daemon_uid 54321 in them" in caplog.text) == told
    assert [text in caplog.text for text in notices.fields()["problems"]] == [True] * told


# ---------------------------------------------------------------- memory


def test_no_descriptor_for_who_did_not_ask(shared: Daemon) -> None:
    with RawSession(shared.socket).greet() as peer:
        assert peer.channel.take_fd() is None


def test_watermark_rises_to_the_whole_arena(tmp_path: Path) -> None:
    with (
        running_daemon(tmp_path, l1_size="1GiB") as daemon,
        RawSession(daemon.socket).greet(wants_arena=True) as peer,
    ):
        marks = [peer.welcome.populated_bytes]
        while marks[-1] < 1024 * MIB:
            marks.append(peer.next(Populated).bytes)
        assert marks == sorted(set(marks))
        assert daemon.status()["l1_populated_bytes"] == 1024 * MIB
        fd = peer.take_arena()
        assert os.fstat(fd).st_blocks * 512 == 1024 * MIB
        os.close(fd)


def test_a_daemon_that_cannot_have_its_memory_ends_with_one_line(tmp_path: Path) -> None:
    """Who touched the rest would be killed."""
    script = (
        "import errno, os, sys\n"
        "from kvass.arena.memory import Arena\n"
        "real = Arena.populate\n"
        "def populate(self, lo, hi):\n"
        "    if lo >= 32 << 20:\n"
        "        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))\n"
        "    real(self, lo, hi)\n"
        "Arena.populate = populate\n"
        "from kvass.cli.main import main\n"
        "sys.exit(main())"
    )
    with running_daemon(tmp_path, l1_size="64MiB", program=("-c", script)) as daemon:
        assert daemon.wait() == 2
        told = daemon.log().splitlines()[-1]
    assert told == (
        "kvass: l1_size: of 64MiB only 32MiB could be had: No space left on device; give less"
    )


def test_memory_and_libraries_of_the_process(shared: Daemon) -> None:
    shared.wait_until(l1_populated_bytes=64 * MIB)
    maps = Path(f"/proc/{shared.pid}/maps").read_text()
    assert "numpy" in maps  # the look works
    assert "torch" not in maps
    assert "libcuda" not in maps
    assert _own_memory(shared.pid) <= 60 * MIB


def _own_memory(pid: int) -> int:
    """Bytes of a process, without what it shares."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith(" kB")}
    return (kib["VmRSS"] - kib["RssShmem"]) << 10


def test_half_frames_of_many_sessions_that_end_leave_no_memory_behind(tmp_path: Path) -> None:
    """Without the collector of cycles: each session is freed as it ends, half a frame of 4 MiB
    with it."""
    script = "import gc, sys; gc.disable(); from kvass.cli.main import main; sys.exit(main())"
    part = framing.HEADER.pack(4 * MIB) + b"x" * (4 * MIB - 1)
    with running_daemon(tmp_path, l1_size="1MiB", program=("-c", script)) as daemon:
        grown = []
        for _ in range(40):
            with RawSession(daemon.socket).greet() as peer:
                peer.raw(part)
                peer.sock.shutdown(socket.SHUT_WR)
                assert isinstance(peer.rest()[-1], Error)
            grown.append(_own_memory(daemon.pid))
        assert grown[-1] - grown[4] < 16 * MIB, grown


def test_idle_daemon_uses_no_cpu(shared: Daemon) -> None:
    shared.wait_until(l1_populated_bytes=64 * MIB)

    clock = ~shared.pid << 3 | 2  # as clock_getcpuclockid(3): the CPU time of another process

    def idle() -> bool:
        before = time.clock_gettime(clock)
        time.sleep(1)
        return time.clock_gettime(clock) - before <= 0.0025  # 0.25 % of a core

    with RawSession(shared.socket).greet():
        assert eventually(idle), "at no time, also not when it has greeted"


# ---------------------------------------------------------------- strangers


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users reach."""
    with tempfile.TemporaryDirectory(prefix="kvass-test-") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.fixture
def stranger() -> int:
    if os.geteuid():
        pytest.skip("only root can become another user")
    return 54321


def try_to_connect(path: str) -> Callable[[], None]:
    def work() -> None:
        with RawSession(path).greet() as peer:
            peer.ask(Ping(), Pong)

    return work


def test_another_user_is_kept_out(open_folder: Path, stranger: int) -> None:
    with running_daemon(open_folder, l1_size="1MiB") as daemon:
        assert as_user(stranger, [], try_to_connect(daemon.socket)) == 1
        os.chmod(daemon.socket, 0o666)  # even then

        def is_told_why() -> None:
            with RawSession(daemon.socket) as peer:
                (error,) = peer.rest()
                assert isinstance(error, Error)
                assert error.code == "forbidden"
                assert f"--allow-uid {stranger}" in error.text

        assert as_user(stranger, [], is_told_why) == 0
        assert daemon.status()["counters"]["ended_forbidden"] == 1


def test_another_user_is_not_told_that_there_is_no_daemon(open_folder: Path, stranger: int) -> None:
    def asks(path: str) -> Callable[[], None]:
        def work() -> None:
            with pytest.raises(
                Unavailable, match=f"not allowed to connect to .*--allow-uid {stranger}"
            ):
                Channel.connect(path, 5.0)

        return work

    with running_daemon(open_folder, l1_size="1MiB") as daemon:
        assert as_user(stranger, [], asks(daemon.socket)) == 0
    os.unlink(daemon.socket)
    assert as_user(stranger, [], asks(daemon.socket)) == 1, "now there is none"


def test_allowed_user_may_connect(open_folder: Path, stranger: int) -> None:
    with running_daemon(open_folder, l1_size="1MiB", allow_uid=[stranger, 5]) as daemon:
        assert as_user(stranger, [], try_to_connect(daemon.socket)) == 0
        assert as_user(stranger + 1, [], try_to_connect(daemon.socket)) == 1


def test_members_of_the_group_may_connect(open_folder: Path, stranger: int) -> None:
    with running_daemon(open_folder, l1_size="1MiB", socket_group="daemon") as daemon:
        entry = os.stat(daemon.socket)
        assert stat.S_IMODE(entry.st_mode) == 0o660
        assert as_user(stranger, [entry.st_gid], try_to_connect(daemon.socket)) == 0
        assert as_user(stranger, [], try_to_connect(daemon.socket)) == 1
