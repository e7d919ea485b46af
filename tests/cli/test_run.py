"""``kvass run``: the command's status and signals are ours, and it has a daemon while it runs."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import indent
from typing import Any, Final

import pytest

from kvass import Client
from kvass.cli.main import main
from kvass.errors import Unavailable
from kvass.testing.daemon import running_daemon
from kvass.wire.channel import Channel
from tests.support.waiting import eventually

WAIT_S: Final = 30
PASSED_ON: Final = (
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM),
)
WAITS: Final = f"""
import os, select, signal, sys
for number in {tuple(map(int, PASSED_ON))}:
    signal.signal(number, lambda number, _: os.write(1, b"got %d\\n" % number))
os.write(1, b"waits\\n")
while not select.select([0], [], [], 0.05)[0]:
    pass  # Python may run a handler only now, if the signal came before the call
sys.exit(7)
"""
"""A command that waits for a line, and meanwhile writes the signals that it gets."""


@contextmanager
def running(
    folder: Path, *command: str, l1_size: str = "1MiB", **more: Any
) -> Iterator[subprocess.Popen[str]]:
    """``kvass run`` with the socket ``s`` in ``folder``. It is killed at the end, if it runs."""
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    flags = ["--l1-size", l1_size, "--socket", f"{folder}/s"]
    arguments = [sys.executable, "-m", "kvass", "run", *flags, "--", *command]
    with subprocess.Popen(arguments, **{**streams, "text": True, **more}) as process:
        try:
            yield process
        finally:
            process.kill()


def result(folder: Path, *command: str, **more: Any) -> tuple[int, str, str]:
    """The status, the output and the errors of ``kvass run``."""
    with running(folder, *command, **more) as process:
        out, errors = process.communicate(timeout=WAIT_S)
        return process.returncode, out, errors


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def daemon_of(folder: Path) -> int:
    """The process id of the daemon in ``folder``; 0 if there is none."""
    try:
        with Client(f"{folder}/s") as client:
            return int(client.status()["pid"])
    except Unavailable:
        return 0


def test_a_command_has_a_daemon_and_its_status_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    code = (
        "import os; from kvass import Client; env = os.environ; "
        "print(env['KVASS'], env['KVASS_SOCKET'], env.get('OPENBLAS_NUM_THREADS'), "
        "Client(env['KVASS']).status()['l1_capacity_bytes']); exit(7)"
    )
    with running(tmp_path, sys.executable, "-c", code) as process:
        out = line_of(process).split()
        assert process.wait(WAIT_S) == 7
        assert os.listdir(tmp_path) == [], "the daemon has ended, and has removed its socket"
        assert process.stderr is not None
        assert f"ready socket={tmp_path}/s" in process.stderr.read()
    assert out == [f"{tmp_path}/s", f"{tmp_path}/s", "None", str(1 << 20)]


def test_a_daemon_that_was_there_is_used_and_left_alone(tmp_path: Path) -> None:
    with running_daemon(tmp_path, l1_size="2MiB", socket=f"{tmp_path}/s") as daemon:
        too_much = "9999TiB"  # of this machine, which is not the daemon's
        status, _, errors = result(tmp_path, "sh", "-c", "kill -9 $$", l1_size=too_much)
        assert status == 128 + signal.SIGKILL
        assert errors == (
            f"kvass: uses the daemon that is at {tmp_path}/s; --l1-size changes nothing in it\n"
        )
        assert daemon_of(tmp_path) == daemon.pid


def test_signals_are_passed_on_once(tmp_path: Path) -> None:
    with running(tmp_path, sys.executable, "-c", WAITS) as process:
        assert line_of(process) == "waits"
        for number in PASSED_ON:
            process.send_signal(number)
            assert line_of(process) == f"got {int(number)}"
        daemon = daemon_of(tmp_path)
        assert daemon, "it does not end before the command"
        os.kill(daemon, signal.SIGSTOP)
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        try:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.3)  # it waits for the daemon
        finally:
            os.kill(daemon, signal.SIGCONT)
        assert process.communicate(timeout=WAIT_S)[0] == ""
        assert process.returncode == 7
    assert not daemon_of(tmp_path)


def test_a_ctrl_c_reaches_the_command_once_and_not_the_daemon(tmp_path: Path) -> None:
    """The terminal sends it to the whole foreground group."""
    ours, theirs = pty.openpty()

    def own_terminal() -> None:
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    with running(
        *(tmp_path, sys.executable, "-c", WAITS),
        stdin=theirs,
        stdout=theirs,
        preexec_fn=own_terminal,
        start_new_session=True,
    ) as process:
        os.close(theirs)
        with os.fdopen(ours, "r+b", buffering=0) as terminal:
            assert b"waits" in terminal.readline()
            daemon = daemon_of(tmp_path)
            assert daemon == os.getsid(daemon) != os.getsid(process.pid)
            process.send_signal(signal.SIGSTOP)  # so that what it sends comes afterwards
            terminal.write(b"\x03")
            assert terminal.readline().split()[-1] == b"2"
            process.send_signal(signal.SIGUSR1)
            process.send_signal(signal.SIGCONT)
            assert terminal.readline().split() == [b"got", b"10"]  # and not 2 again
            assert daemon_of(tmp_path) == daemon
            terminal.write(b"\n")
            assert process.wait(WAIT_S) == 7


def test_a_daemon_that_ends_first_is_said_and_the_command_goes_on(tmp_path: Path) -> None:
    with running(tmp_path, sys.executable, "-c", WAITS) as process:
        assert line_of(process) == "waits"
        os.kill(daemon_of(tmp_path), signal.SIGKILL)
        assert process.stderr is not None
        assert "started a daemon" in process.stderr.readline()
        assert (
            process.stderr.readline() == "kvass: the daemon has ended with status 137: uncached\n"
        )
        assert process.communicate("\n", timeout=WAIT_S) == ("", "")
        assert process.returncode == 7


def test_a_daemon_does_not_outlive_who_started_it(tmp_path: Path) -> None:
    with running(tmp_path, sys.executable, "-c", WAITS) as process:
        assert line_of(process) == "waits"
        assert daemon_of(tmp_path)
        process.kill()
        assert eventually(lambda: not daemon_of(tmp_path))


@pytest.mark.parametrize(
    ("command", "status", "says"),
    [
        ("absent", 127, "kvass: there is no command 'absent'\n"),
        ("/absent/too", 127, "kvass: there is no command '/absent/too'\n"),
        ("/etc/passwd", 126, "kvass: /etc/passwd cannot be executed\n"),
    ],
)
def test_a_command_that_cannot_be_run_is_one_line_and_starts_no_daemon(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str, status: int, says: str
) -> None:
    assert main(["run", "--socket", f"{tmp_path}/s", "--", command, "--serve"]) == status
    assert capsys.readouterr().err == says
    assert os.listdir(tmp_path) == []


def test_a_script_whose_interpreter_is_missing_is_a_line_after_the_daemons(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/absent/sh\n")
    script.chmod(0o700)
    status, _, errors = result(tmp_path, str(script))
    assert status == 127
    assert f"kvass: {script} cannot be run: No such file or directory\n" in errors
    assert not daemon_of(tmp_path)


@pytest.mark.parametrize(
    "waits",
    [
        "while not select.select([0], [], [], 0)[0]: run._sleep(0.01)\nos._exit(7)",
        "pid = os.posix_spawn('/bin/sh', ['sh', '-c', 'read x; exit 7'], {}, setsigmask=before)\n"
        "os._exit(run._status(run._wait(pid, run._Daemon(''))))",
    ],
    ids=["the daemon", "the command"],
)
def test_who_is_stopped_while_it_waits_goes_on(waits: str) -> None:
    """Python 3.11 then gives a signal with any number, which never came."""
    code = "import os, select\nfrom kvass.cli import run\nrun._LOOK_S = 0.01\n"
    code += "with run._signals_wait() as before:\n  print('waits', flush=True)\n"
    code += indent(waits, "  ")
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True) as one:
        assert line_of(one) == "waits"
        for _ in range(10):
            one.send_signal(signal.SIGSTOP)
            time.sleep(0.03)
            one.send_signal(signal.SIGCONT)
            time.sleep(0.02)
        one.communicate("\n", timeout=WAIT_S)
        assert one.returncode == 7


def test_a_daemon_that_does_not_start_says_why_and_its_status_is_ours(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    status, _, errors = result(tmp_path, "touch", str(ran), l1_size="9999TiB")
    assert status == 2
    (line,) = errors.splitlines()
    assert line.startswith("kvass: --l1-size 9999TiB: more than the ")
    (tmp_path / "s").touch()  # known to the daemon alone
    status, _, errors = result(tmp_path, "touch", str(ran))
    assert (status, errors) == (
        2,
        f"kvass: {tmp_path}/s exists and is no socket: choose another --socket\n",
    )
    assert not ran.exists()


def test_of_two_at_once_one_starts_the_daemon(tmp_path: Path) -> None:
    command = (sys.executable, "-c", WAITS)
    with running(tmp_path, *command) as one, running(tmp_path, *command) as other:
        assert [line_of(one), line_of(other)] == ["waits", "waits"]
        errors = [process.communicate("\n", timeout=WAIT_S)[1] for process in (one, other)]
        assert [one.returncode, other.returncode] == [7, 7]
    assert sorted("started a daemon" in text for text in errors) == [False, True]


def test_who_can_open_the_folder_cannot_keep_a_command_waiting(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        status, _, errors = result(tmp_path, "true")
    finally:
        os.close(folder)
    assert (status, "waiting" in errors) == (0, False)


@contextmanager
def lock_held(path: Path, text: str = "", user: int | None = None) -> Iterator[int]:
    """Another process's lock of the file; ``user``: whose file it is."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        if user is not None:
            os.chown(path, user, user)
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def test_who_is_waited_for_is_said_at_once(tmp_path: Path) -> None:
    with lock_held(tmp_path / "s.run", f"{os.getpid()}") as fd, running(tmp_path, "true") as waits:
        assert waits.stderr is not None
        assert waits.stderr.readline() == (
            f"kvass: {tmp_path}/s.run is locked by process {os.getpid()}: waiting up to 60 s\n"
        )
        assert not daemon_of(tmp_path)
        fcntl.flock(fd, fcntl.LOCK_UN)
        assert "started a daemon" in waits.communicate(timeout=WAIT_S)[1]
        assert waits.returncode == 0
    assert os.listdir(tmp_path) == []


def test_a_signal_ends_the_wait(tmp_path: Path) -> None:
    with lock_held(tmp_path / "s.run"), running(tmp_path, "true") as waits:
        assert waits.stderr is not None
        assert "s.run is locked by process ?" in waits.stderr.readline()
        waits.send_signal(signal.SIGTERM)
        assert waits.wait(WAIT_S) == 128 + signal.SIGTERM


def test_a_strangers_lock_is_not_waited_for(tmp_path: Path) -> None:
    """The stranger was first in a folder that both may write to."""
    if os.geteuid():
        pytest.skip("only root can make a stranger's file")
    with subprocess.Popen(["true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        of = f"{tmp_path}/s%s is locked by a process of user 54321: %s"
        with lock_held(tmp_path / "s.run", f"{ended.pid}", 54_321):
            status, _, errors = result(tmp_path, "true")
        assert (status, errors.splitlines()[0]) == (0, "kvass: " + of % (".run", "not waiting"))
        with lock_held(tmp_path / "s.lock", f"{ended.pid}", 54_321):
            status, _, errors = result(tmp_path, "true")
        assert status == 2
        assert errors == "kvass: " + of % (".lock", "choose another --socket") + "\n"


def test_a_strangers_daemon_is_refused_and_the_command_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = tmp_path / "ran"
    flags = ["run", "--socket", f"{tmp_path}/s", "--", "touch", str(ran)]
    with running_daemon(tmp_path, l1_size="1MiB", socket=f"{tmp_path}/s"):
        with monkeypatch.context() as patched:
            patched.setattr(Channel, "daemon_uid", 54_321)
            assert main(flags) == 2
        assert f"kvass: uid 54321 listens at {tmp_path}/s" in capsys.readouterr().err
        assert not ran.exists()
        assert main(flags) == 0  # the control
        assert ran.exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "no command: write it after --, as in kvass run -- vllm serve MODEL"),
        (["--l1-size", "1MiB", "--"], "no command: write it after --"),
        (["--l1-siz", "1MiB", "--", "true"], "unrecognized arguments"),
        (["--flush", "later", "--", "true"], "--flush: say one of write_through, on_evict, none"),
    ],
)
def test_wrong_options_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert main(["run", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_the_command_may_have_a_double_dash_of_its_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with running_daemon(tmp_path, l1_size="1MiB", socket=f"{tmp_path}/s"):
        flags = ["run", "--socket", f"{tmp_path}/s"]
        assert main([*flags, "--", "echo", "--", "a"]) == 0
        assert main([*flags, "echo", "-n", "--", "a"]) == 0
    assert capfd.readouterr().out == "-- a\n-- a"


def test_the_command_gets_whole_paths(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kvass.yaml").write_text("socket: s\ntag: a\n")
    with running_daemon(tmp_path, l1_size="1MiB", socket=f"{tmp_path}/s"):
        show = "echo $KVASS $KVASS_SOCKET $KVASS_CONFIG"
        assert main(["run", "--config", "kvass.yaml", "--", "sh", "-c", show]) == 0
    found = capfd.readouterr().out.split()
    assert found == [f"{tmp_path}/s", f"{tmp_path}/s", f"{tmp_path}/kvass.yaml"]
