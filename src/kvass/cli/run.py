"""The command ``kvass run``: runs a command with kvass switched on, and a daemon if there is none.

Laws of this file:

- The command runs in the foreground, in our process group, with our standard streams. Its exit
  status is ours; 128 + N if signal N ended it.
- A daemon that was started here ends after the command, and not before. It has a session of its
  own, so a Ctrl-C does not reach it. Its stdin is a pipe from this process. At the pipe's end it
  stops, so it does not stay if this process is killed. The kernel's death signal (prctl) comes at
  the end of the thread that asked for it.
- A daemon that was there before is used, and left alone.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import select
import shutil
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Final

from kvass.cli.environment import SET_HERE
from kvass.client.client import Client
from kvass.config import CONNECTION, FILE_ENV, Config, Parser, add_flags, load
from kvass.errors import ConfigError, Unavailable
from kvass.wire.places import default_socket, make_folder

NOT_EXECUTABLE: Final = 126
NOT_FOUND: Final = 127
"""Exit statuses for a command that cannot be run, as those of a shell."""
_CONNECT_S: Final = 10.0
TURN_S: Final = 60.0
"""How long to wait until another ``kvass run`` has started its daemon."""
_LOOK_S: Final = 0.5
"""How often children are looked at without a SIGCHLD, which a thread may take that does not block
it."""
_SI_KERNEL: Final = 0x80
"""The ``si_code`` of a signal from the terminal (siginfo.h). The kernel sends it to all of the
foreground group."""
_PASSED_ON: Final = frozenset(
    {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
)
Mask = set[int | signal.Signals]
_SIGNALS: Final = _PASSED_ON | {signal.SIGCHLD}


def run(argv: list[str]) -> int:
    """Run the command; returns its exit status. Raises ``ConfigError``, and what ``Client`` raises
    for a daemon that may not be used."""
    parser = Parser(
        prog="kvass run",
        usage="kvass run [OPTIONS OF kvass serve] -- COMMAND [ARGUMENT ...]",
        description="Run a command, for example `vllm serve MODEL`, with kvass switched on: KVASS "
        "and KVASS_SOCKET are set in its environment. If no daemon answers at the socket, one is "
        "started with these options, and stopped when the command has ended. A second `kvass run` "
        "uses the daemon of the first. When the first one ends its daemon ends, too, and engines "
        "of the second run uncached: to share a daemon longer, start `kvass serve`.",
    )
    add_flags(parser)
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file of these options; engines read theirs in it"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run")
    end = argv.index("--") if "--" in argv else len(argv)
    options = vars(parser.parse_args(argv[:end]))
    begun, file = options.pop("command"), options.pop("config")  # ``begun``: it was before the --
    command = begun + argv[end:] if begun else argv[end + 1 :]
    if not command:
        raise ConfigError("no command: write it after --, as in kvass run -- vllm serve MODEL")
    if status := _check(command[0]):
        return status
    config = load(options, os.environ, file, wanted=CONNECTION)
    check = partial(load, options, os.environ, file)
    with _signals_wait() as before:
        try:
            daemon = _daemon(config, argv[: end - len(begun)], before, check)
        except _Signalled as signalled:
            return 128 + signalled.number
        if not daemon.path:
            return daemon.status or 1
        return _foreground(command, _environment(config, daemon.path, file), daemon, before)


def _environment(config: Config, path: str, file: str | None) -> dict[str, str]:
    """The command's environment: ours, with what says where the daemon and the options are."""
    path = os.path.abspath(path)  # the command may change its folder
    found = {name: text for name, text in os.environ.items() if name not in SET_HERE}
    found |= {"KVASS": path, "KVASS_SOCKET": path}
    if config.daemon_uid is not None:
        found["KVASS_DAEMON_UID"] = str(config.daemon_uid)
    if file:
        found[FILE_ENV] = os.path.abspath(file)
    return found


def _check(name: str) -> int:
    """The exit status if there is no such command; 0 if there is one."""
    if shutil.which(name):
        return 0
    if os.path.exists(name):
        return _fail(f"{name} cannot be executed", NOT_EXECUTABLE)
    return _fail(f"there is no command {name!r}", NOT_FOUND)


def _fail(text: str, status: int) -> int:
    _say(text)
    return status


def _say(text: str) -> None:
    print(f"kvass: {text}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------- the daemon


@dataclass
class _Daemon:
    """A daemon that answers at ``path``. ``pid``: its process, if it was started here. ``stdin``:
    our end of the pipe at whose end it stops. An empty ``path``: it could not be started, and has
    said why."""

    path: str
    pid: int = 0
    stdin: int = -1
    status: int = 0
    """The exit status of a process that could not be started."""


def _daemon(
    config: Config, arguments: Sequence[str], before: Mask, check: Callable[[], object]
) -> _Daemon:
    """The daemon that answers at the socket, else one that is started with ``arguments``, which
    ``check`` checks. Raises what it raises."""
    if not (found := _answering(config)):
        check()
        path = config.socket or default_socket()
        with _turn(path):
            if not (found := _answering(config)):
                return _start(path, arguments, before)
    others = [one for one in arguments if one.startswith("--") and "socket" not in one]
    said = f"; {', '.join(others)} changes nothing in it" if others else ""
    _say(f"uses the daemon that is at {found}{said}")
    return _Daemon(found)


@contextmanager
def _turn(path: str) -> Iterator[None]:
    """Holds the lock file ``PATH.run``, so that of several ``kvass run`` one starts a daemon. Goes
    on without it after ``TURN_S``, and where it cannot be had. Raises ``ConfigError``."""
    from kvass.daemon.listen import Locked, try_lock  # not needed where a daemon answers

    make_folder(path)
    file, fd, deadline_s = path + ".run", -1, time.monotonic() + TURN_S
    said = False
    while fd < 0 and time.monotonic() < deadline_s:
        try:
            fd = try_lock(file)
        except ConfigError:  # the daemon will say what is wrong with the folder
            break
        except Locked as locked:
            if not locked.is_ours:
                _say(f"{locked}: not waiting")
                break
            if not said:
                _say(f"{locked}: waiting up to {TURN_S:g} s")
            said = True
            _sleep(0.05)
    try:
        yield
    finally:
        if fd >= 0:
            with suppress(OSError):
                os.unlink(file)
            os.close(fd)


def _answering(config: Config) -> str:
    """The socket of the daemon that answers; empty if there is none. Raises what ``connect`` raises
    for one that may not be used."""
    with Client(config.socket, daemon_uid=config.daemon_uid) as client:
        try:
            client.connect(_CONNECT_S)
        except Unavailable as error:
            if isinstance(error.__cause__, FileNotFoundError | ConnectionRefusedError):
                return ""
            raise
        connection = client.connection
        return "" if connection is None else connection.path


def _start(path: str, arguments: Sequence[str], before: Mask) -> _Daemon:
    """Start a daemon, and wait until it is ready or has ended. Raises ``_Signalled``."""
    command = [sys.executable, "-m", "kvass", "serve", *arguments, f"--socket={path}", "--child"]
    (its_stdin, stdin), (stdout, its_stdout) = os.pipe(), os.pipe()
    streams = [(os.POSIX_SPAWN_DUP2, its_stdin, 0), (os.POSIX_SPAWN_DUP2, its_stdout, 1)]
    pid = os.posix_spawn(
        *(sys.executable, command, os.environ),
        file_actions=streams,
        setsid=True,
        setsigmask=before,
    )
    os.close(its_stdin)
    os.close(its_stdout)
    try:
        line = _read_line(stdout)
    except _Signalled:
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)
        raise
    if not line.startswith("ready"):
        return _Daemon("", status=_status(os.waitpid(pid, 0)[1]))
    _say(f"started a daemon, process {pid}: {line}")
    return _Daemon(path, pid, stdin)


def _read_line(fd: int) -> str:
    """The first line of a pipe; empty at its end. Raises ``_Signalled``."""
    text = b""
    while not text.endswith(b"\n"):
        if not select.select([fd], [], [], 0)[0]:
            _sleep(0.01)
        elif more := os.read(fd, 4096):
            text += more
        else:
            return ""
    return text.decode(errors="backslashreplace").strip()


# ---------------------------------------------------------------- the command


def _foreground(
    command: list[str], environment: Mapping[str, str], daemon: _Daemon, before: Mask
) -> int:
    """Run ``command``, then stop ``daemon`` if it was started here; the exit status."""
    try:
        pid = os.posix_spawnp(command[0], command, environment, setsigmask=before)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        text = f"{command[0]} cannot be run: {error.strerror}"
        status = _fail(text, NOT_FOUND if missing else NOT_EXECUTABLE)
    else:
        status = _status(_wait(pid, daemon))
    if daemon.pid:
        os.kill(daemon.pid, signal.SIGTERM)
        _wait(daemon.pid, daemon)
    return status


def _status(waited: int) -> int:
    """The exit status of a process, of its wait status."""
    code = os.waitstatus_to_exitcode(waited)
    return code if code >= 0 else 128 - code


class _Signalled(Exception):
    """A signal came before the command was started."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _sleep(seconds: float) -> None:
    """Sleep, unless a signal comes. Raises ``_Signalled``."""
    if (found := _signal(_PASSED_ON, seconds)) is not None:
        raise _Signalled(found.si_signo)


def _signal(numbers: frozenset[signal.Signals], seconds: float) -> signal.struct_siginfo | None:
    """The next of these signals; None: there was none for so long.

    ``sigtimedwait`` itself does not wait: if this process was stopped until its time was over, it
    would give what no signal was (Python 3.11).
    """
    select.select([_signal_fd(numbers)], [], [], seconds)
    return signal.sigtimedwait(numbers, 0)


@cache
def _signal_fd(numbers: frozenset[signal.Signals]) -> int:
    """A signalfd(2): it is readable while one of these signals waits. Nobody reads it."""
    mask = struct.pack("=Q120x", sum(1 << number - 1 for number in numbers))
    libc = ctypes.CDLL(None, use_errno=True)
    if (fd := libc.signalfd(-1, mask, os.O_CLOEXEC)) < 0:
        raise OSError(ctypes.get_errno(), "no signalfd")
    return int(fd)


@contextmanager
def _signals_wait() -> Iterator[Mask]:
    """Blocks the signals that ``_wait`` takes. Gives the signals that were blocked before.

    A thread that began earlier would not block them, and could take one. So this comes first.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it was ignored, no child could be waited for
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield before
    finally:
        while signal.sigtimedwait(_SIGNALS, 0) is not None:
            pass  # what came too late must not end this process before it says its status
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(pid: int, daemon: _Daemon) -> int:
    """The wait status of the child ``pid``. Meanwhile signals are passed on to it.

    A signal of the terminal has reached the command already, and is passed on to the daemon alone.
    """
    while True:
        found = _signal(_SIGNALS, _LOOK_S)
        if found is not None and found.si_signo != signal.SIGCHLD:
            if found.si_code != _SI_KERNEL or pid == daemon.pid:
                os.kill(pid, found.si_signo)
            continue
        ended = _ended({pid, daemon.pid} - {0})
        if daemon.pid in ended and daemon.pid != pid:
            _say(f"the daemon has ended with status {_status(ended[daemon.pid])}: uncached")
            daemon.pid = 0
        if pid in ended:
            return ended[pid]


def _ended(pids: set[int]) -> dict[int, int]:
    """The wait status of those of the children ``pids`` that have ended. The first process of a
    container waits for all, because orphans become its children."""
    found: dict[int, int] = {}
    waiting = [-1] if os.getpid() == 1 else sorted(pids)
    while waiting:
        try:
            pid, status = os.waitpid(waiting[-1], os.WNOHANG)
        except ChildProcessError:
            pid = 0
        if pid:
            found[pid] = status
        if waiting[-1] != -1 or not pid:
            waiting.pop()
    return found
