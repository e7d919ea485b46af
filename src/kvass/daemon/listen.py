"""The socket path of a daemon: which daemon owns it, and which users may connect to it.

Law of this file: one live daemon per path. The owner holds a lock (flock) on ``<socket>.lock``. The
kernel releases the lock when the owner's process ends, so a new daemon takes over the path of a
dead one without a race. SO_PEERCRED decides who may connect. The file mode is only a first filter.
"""

from __future__ import annotations

import errno
import fcntl
import grp
import logging
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from kvass import processes
from kvass.config import Config
from kvass.daemon.notices import Notices
from kvass.errors import ConfigError
from kvass.wire.channel import PeerCredentials, check_path
from kvass.wire.places import make_folder
from kvass.wire.trust import others_at

BACKLOG: Final = 1024
_log = logging.getLogger("kvass")
LOCK_WAIT_S: Final = 1.0
"""Seconds to wait for the lock of a daemon that may be ending."""
_EXIT_WAIT_S: Final = 60.0
"""Seconds to wait for the lock of a process that is exiting. The kernel takes down its mapping of
the arena before it releases the lock, which takes 0.1 to 0.3 s per GiB."""


class Access:
    """The rules for who may connect: our own user, and the users and the group of the
    configuration.

    Raises ``ConfigError`` for a group that does not exist.
    """

    def __init__(self, config: Config) -> None:
        self._uids = frozenset([os.geteuid(), *config.allow_uid])
        self._group: int | None = None
        self._mode = 0o666 if config.allow_uid else 0o600
        if config.socket_group:
            try:
                self._group = grp.getgrnam(config.socket_group).gr_gid
            except (KeyError, ValueError):
                raise ConfigError(f"socket_group {config.socket_group!r}: no such group") from None
            self._mode |= 0o660

    @property
    def others(self) -> bool:
        """Whether other users may connect."""
        return self._mode != 0o600

    def apply(self, path: str) -> None:
        """Give the socket at ``path`` its group and mode. Raises ``ConfigError``."""
        try:
            if self._group is not None:
                os.chown(path, -1, self._group)
            os.chmod(path, self._mode)
        except OSError as error:
            raise ConfigError(f"cannot set the access to {path}: {error.strerror}") from error

    def look_at(self, path: str, notices: Notices) -> None:
        """Say whether other users' engines will refuse a daemon at ``path``."""
        notices.over("access")
        own = os.geteuid()
        if self.others and own and (reason := others_at(path, own)):
            notices.problem(
                "access",
                f"{path}: {reason}, so engines of other users take this daemon for a stranger's "
                f"and run uncached: choose another --socket, or set kvass.daemon_uid {own} in them",
            )

    def refusal(self, peer: PeerCredentials) -> str | None:
        """Return None if ``peer`` may connect, else the text of the refusal."""
        if peer.uid in self._uids or self._group in peer.groups:
            return None
        return f"uid {peer.uid} may not connect: kvass serve --allow-uid {peer.uid} lets it"


@contextmanager
def listening(path: str, access: Access) -> Iterator[socket.socket]:
    """Lock ``path`` and listen on it. On exit the socket and its lock file are removed.

    Raises ``ConfigError`` if the path is too long, if its folder does not exist or is not writable,
    or if a live daemon uses the path.
    """
    check_path(path)
    make_folder(path)
    if not os.path.isdir(folder := os.path.dirname(os.path.abspath(path))):
        raise ConfigError(f"no folder {folder}: create it or choose another --socket")
    with ExitStack() as ending:
        ending.callback(os.close, _lock(path + ".lock"))
        ending.callback(Path(path + ".lock").unlink, missing_ok=True)
        _remove_dead(path)
        sock = ending.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        _bind(sock, path, access)
        ending.callback(Path(path).unlink, missing_ok=True)
        yield sock


class Locked(Exception):
    """Another process has the lock. Only ``is_ours``, one of this user or of root, is worth waiting
    for: another user could keep it for ever."""

    def __init__(self, path: str, fd: int) -> None:
        text = os.pread(fd, 20, 0)
        self.pid = int(text) if text.isdigit() else 0
        """Its process; 0 if that is not known."""
        uid = os.fstat(fd).st_uid
        self.is_ours = uid in (0, os.geteuid())
        by = f"process {self.pid or '?'}" if self.is_ours else f"a process of user {uid}"
        super().__init__(f"{path} is locked by {by}")


def try_lock(path: str) -> int:
    """Lock the file ``path`` and write our pid into it. Returns the descriptor that holds the lock.
    Other users cannot open a file that is made here. Raises ``Locked``, and ``ConfigError`` if it
    cannot be written."""
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                os.truncate(fd, 0)
                os.pwrite(fd, str(os.getpid()).encode(), 0)
                return fd
        except FileNotFoundError:
            pass  # its last holder removed it after we opened it
        except BlockingIOError:
            locked = Locked(path, fd)
            os.close(fd)
            raise locked from None
        except OSError as error:
            os.close(fd)
            raise ConfigError(f"cannot lock {path}: {error.strerror}") from error
        os.close(fd)


def _lock(path: str) -> int:
    """Lock the file ``path``, as ``try_lock`` does, when its holder has released it."""
    begun = time.monotonic()
    said_s = LOCK_WAIT_S
    while True:
        try:
            return try_lock(path)
        except Locked as locked:
            if not locked.is_ours:
                raise ConfigError(f"{locked}: choose another --socket") from None
            exiting = locked.pid > 0 and processes.exiting(locked.pid)
            wait_s = _EXIT_WAIT_S if exiting else LOCK_WAIT_S
            if wait_s > said_s:
                said_s = wait_s
                is_what = ", which is exiting" if exiting else ""
                _log.info("%s%s: waiting up to %g s", locked, is_what, wait_s)
            if time.monotonic() - begun > wait_s:
                raise ConfigError(
                    f"{path[:-5]} is in use by the live daemon {locked.pid or '?'}: stop it "
                    "first, or choose another --socket"
                ) from None
        time.sleep(0.01)


def _bind(sock: socket.socket, path: str, access: Access) -> None:
    before = os.umask(0o177)  # no other user can connect between bind and chmod
    try:
        sock.bind(path)
        access.apply(path)
        sock.listen(BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {path}: {error.strerror}") from error
    finally:
        os.umask(before)


def _remove_dead(path: str) -> None:
    """Remove the socket file of a dead daemon. The caller holds the lock."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ConfigError(f"{path} exists and is no socket: choose another --socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        if probe.connect_ex(path) != errno.ECONNREFUSED:
            raise ConfigError(f"{path} is in use by another program: choose another --socket")
    os.unlink(path)
