"""The default places of the daemon's socket.

Law of this file: the daemon listens at the first of these places that it may use, and a client that
was told no socket tries all of them. So the two find each other even if their environments differ,
for example if one was started by systemd and the other in a login session.
"""

from __future__ import annotations

import os
import stat
from typing import Final

from kvass.errors import ConfigError, Unavailable

SERVICE_FOLDER: Final = "/run/kvass"
"""The folder of a daemon that runs as a service. ``deploy/kvass.service`` makes it."""
_LOGIN_FOLDERS: Final = "/run/user"
"""Where systemd makes each user's ``XDG_RUNTIME_DIR``."""
_TEMPORARY_FOLDERS: Final = ("/tmp", "/var/tmp")
_NAME: Final = "kvass.sock"


def default_socket() -> str:
    """The path at which a daemon listens that was told none.

    It is in ``$XDG_RUNTIME_DIR`` if this user may write to it, else in ``/run/kvass`` if this user
    may write to that or create it, else in this user's folder in the temporary folder.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and _may_write(runtime):
        return os.path.join(runtime, _NAME)
    there = os.path.isdir(SERVICE_FOLDER)
    if _may_write(SERVICE_FOLDER if there else os.path.dirname(SERVICE_FOLDER)):
        return service_socket()
    return _temporary_socket()


def _may_write(folder: str) -> bool:
    return os.access(folder, os.W_OK | os.X_OK)


def socket_places() -> list[str]:
    """The paths that a client tries that was told no socket, in this order."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    own = os.path.join(_LOGIN_FOLDERS, str(os.geteuid()))
    places = [os.path.join(folder, _NAME) for folder in (runtime, own) if folder]
    return list(dict.fromkeys([*places, service_socket(), _temporary_socket()]))


def likely_socket() -> str:
    """The first default place where there is a socket; ``default_socket`` if there is none."""
    return next(filter(os.path.exists, socket_places()), "") or default_socket()


def service_socket() -> str:
    """The path in ``/run/kvass``, which other users can reach if the daemon lets them."""
    return os.path.join(SERVICE_FOLDER, _NAME)


def _temporary_socket() -> str:
    """It is named where no temporary folder can be written, too: the root may be read-only. So not
    by ``tempfile.gettempdir``, which writes a file, and raises where it cannot."""
    named = [os.environ[name] for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name)]
    usable = filter(_may_write, [*named, *_TEMPORARY_FOLDERS])
    folder = os.path.abspath(next(usable, _TEMPORARY_FOLDERS[0]))
    return os.path.join(folder, f"kvass-{os.geteuid()}", _NAME)


def make_folder(path: str) -> None:
    """Make the folder of ``path`` if it is a default place that the daemon makes itself. Raises
    ``ConfigError`` if that is impossible, and what ``check_folder`` raises."""
    mode = {_temporary_socket(): 0o700, service_socket(): 0o755}.get(path)
    if mode is not None:
        folder = os.path.dirname(path)
        try:
            os.mkdir(folder, mode)
        except FileExistsError:
            pass
        except OSError as error:
            raise ConfigError(
                f"no folder {folder}, and none can be made ({error.strerror}): name a --socket in "
                "a folder of yours"
            ) from error
    if path == _temporary_socket():
        check_folder(path)


def check_folder(path: str) -> None:
    """Refuse the default ``path`` in the temporary folder if another user may write to the
    folder that it is in.

    Any user could have created that folder first, and be listening there. Raises ``ConfigError`` if
    another user may write to it, and ``Unavailable`` if it does not exist. Other paths are not
    checked.
    """
    if path != _temporary_socket():
        return
    folder = os.path.dirname(path)
    try:
        found = os.lstat(folder)
    except OSError as error:
        raise Unavailable(f"no daemon at {path}: {error.strerror}") from error
    if found.st_uid != os.geteuid():
        raise ConfigError(f"{folder} belongs to another user: choose another socket")
    if not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o022:
        raise ConfigError(f"{folder} is no folder of yours alone: chmod 700 {folder}")
