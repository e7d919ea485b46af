"""The check that the process listening at a socket's path may be trusted as the daemon.

A client maps the daemon's memory and computes with what is there, so a stranger who listens first,
at a path in a folder that everybody may write to, could answer anything.

Law of this file: who listens is believed only if the kernel says (SO_PEERCRED) that it is root, our
own user, or the user that was named; or a user of whom the files show that nobody else can have put
a socket there.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvass.errors import UntrustedDaemon

_OVERFLOW: Final = Path("/proc/sys/kernel/overflowuid")
_NOBODY: Final = 65534
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


def check_daemon(path: str, uid: int, daemon_uid: int | None = None) -> None:
    """Raise ``UntrustedDaemon`` unless user ``uid``, who listens at ``path``, may be believed.
    ``daemon_uid``: the user that was named. If one was, the files are not checked."""
    if uid in (0, os.geteuid(), daemon_uid):
        return
    if daemon_uid is not None:
        do = (
            f"it has to be uid {daemon_uid} (kvass.daemon_uid, --daemon-uid), root or your own user"
        )
        raise UntrustedDaemon(f"uid {uid} listens at {path}: {do}")
    if reason := others_at(path, uid):
        raise UntrustedDaemon(
            f"uid {uid} listens at {path}, and may be a stranger: {reason}. If it is your daemon, "
            f"name its user (kvass.daemon_uid {uid} in an engine, --daemon-uid {uid} in a command) "
            "or put the socket into a folder that only its user can write to"
        )


def others_at(path: str, uid: int) -> str:
    """Who else than user ``uid``, root and ourselves can put a socket at ``path``; empty: nobody.

    The sticky bit of a folder does not help: it keeps what is there, but whoever comes first may
    put something there.
    """
    if uid == _overflow_uid():
        return f"uid {uid} stands for all users that this user namespace does not know"
    try:
        if (owner := os.stat(path).st_uid) != uid:
            return f"the socket's file belongs to uid {owner}"
        for folder in _folders(path):
            found = os.stat(folder)
            if found.st_uid not in (0, os.geteuid(), uid):
                return f"the folder {folder} belongs to uid {found.st_uid}"
            if found.st_mode & _OTHERS_WRITE:
                return f"others may write to the folder {folder}"
    except OSError as error:
        return f"{error.filename} cannot be looked at: {error.strerror}"
    return ""


def _folders(path: str) -> Iterator[str]:
    """All folders on the way to ``path``, also on that which its symbolic links take."""
    seen = set[str]()
    todo = [os.path.abspath(path)]
    while todo:
        one = todo.pop()
        if one in seen:
            continue
        seen.add(one)
        if os.path.islink(one):
            todo.append(os.path.normpath(os.path.join(os.path.dirname(one), os.readlink(one))))
        if (above := os.path.dirname(one)) != one:
            yield above
            todo.append(above)


def _overflow_uid() -> int:
    try:
        return int(_OVERFLOW.read_text())
    except (OSError, ValueError):
        return _NOBODY
