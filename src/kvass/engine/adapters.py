"""LoRA adapters: the digest of an adapter's weights, to be mixed into its requests' chunk hashes.

Engines hash an adapter's name and path only, and do not look again at what lies there. With this
digest an adapter that is trained anew in the same folder shares nothing with the old one.

Laws of this file:

- An adapter's weights are what its files held at its first request in this engine, if they did not
  change after the engine started. Once they change it is uncached for the engine's life: no engine
  tells which weights it has loaded, and its own prefix cache keeps what the old ones computed.
- A look at the files counts only for what was first needed in the same step or before.
- Only threads of this file touch the file system. A step waits for them at most ``WAIT_S``. A path
  has one look under way at a time.
"""

from __future__ import annotations

import enum
import hashlib
import os
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvass.engine import identity
from kvass.engine.boundary import log, on_thread

WAIT_S: Final = 0.005
"""How long a step may wait for the file system, for all its requests together."""
PATIENCE_S: Final = 0.25
"""How long a request may be told to ask again because of one look."""
CONFIG: Final = "adapter_config.json"


class NoSalt(enum.Enum):
    """Why an adapter's requests cannot be cached."""

    PENDING = "a look is under way: ask again"
    UNKNOWN = "nothing is known of its files at present"
    NEVER = "nor will it be while this engine runs"


@dataclass(frozen=True)
class AdapterFiles:
    """``content`` is equal for equal adapters in any engine. ``state`` changes whenever one of the
    files does; ``newest_ns`` is the time of the last change."""

    content: str
    state: str
    newest_ns: int


@dataclass
class PathState:
    """What is known of one path. ``first``: its files at its first request. ``files``: by the last
    look that has answered, of step ``step``. ``look``: under way since step ``asked``."""

    first: AdapterFiles | None = None
    files: AdapterFiles | None = None
    step: int = -1
    look: Future[AdapterFiles] | None = None
    asked: int = -1
    asked_s: float = 0.0
    never: bool = False
    slow: bool = False
    logged: bool = False


class Adapters:
    """The adapters of one engine, by path. Used from the engine's scheduler thread only.
    ``settings`` are those of the engine that change what an adapter computes."""

    def __init__(self, settings: str = "") -> None:
        self.step = 0
        self._settings = settings
        self._began_ns = time.time_ns()
        self._paths: dict[str, PathState] = {}
        self._left_s = WAIT_S

    def salt(self, path: str, since: int) -> bytes | NoSalt:
        """What to mix into the hashes of this adapter's requests. ``since``: the step in which it
        was first needed; an older look does not count."""
        state = self._paths.setdefault(path, PathState())
        self._collect(path, state)
        if state.look is None and state.step < self.step and not state.never:
            state.asked, state.asked_s = self.step, time.monotonic()
            state.look = on_thread("kvass-adapter", read, path, state.files)
        if state.look is not None and state.step < since and state.asked == self.step:
            if not state.slow:
                self._wait(state)
            self._collect(path, state)
        if state.never:
            return NoSalt.NEVER
        if state.files is not None and state.step >= since:
            return self._salt_of(path, state, state.files)
        if state.look is not None:
            if time.monotonic() - state.asked_s < PATIENCE_S:
                return NoSalt.PENDING
            self._log(path, state, "its files could not be looked at in time")
        return NoSalt.UNKNOWN

    def new_step(self) -> None:
        """A step begins: files may have changed, and the step may wait anew."""
        self.step += 1
        self._left_s = WAIT_S

    def _salt_of(self, path: str, state: PathState, now: AdapterFiles) -> bytes | NoSalt:
        """The salt, if the files are what they were at the adapter's first request."""
        why = ""
        if state.first is None and now.newest_ns > self._began_ns:
            why = "its files are younger than this engine, which may have read others before"
        elif state.first is not None and now.state != state.first.state:
            why = "its files changed under a running engine"
        if why:
            state.never, state.logged = True, False
            self._log(path, state, f"{why}; until the engine restarts. Give new weights a new path")
            return NoSalt.NEVER
        state.first = now
        return bytes.fromhex(identity.digest([self._settings, now.content]))

    def _log(self, path: str, state: PathState, why: object) -> None:
        if not state.logged:
            log.warning("LoRA adapter %s runs uncached: %s", path, why)
        state.logged = True

    def _wait(self, state: PathState) -> None:
        """Wait for the time that is left of this step's. A path that takes longer is not waited for
        again: its requests are asked again in later steps."""
        assert state.look is not None
        began_s = time.monotonic()
        try:
            state.look.exception(self._left_s)
        except TimeoutError:
            state.slow = True
        self._left_s = max(0.0, self._left_s - (time.monotonic() - began_s))

    def _collect(self, path: str, state: PathState) -> None:
        """Take the result of the look under way, if it is there."""
        if state.look is None or not state.look.done():
            return
        look, state.look = state.look, None
        error = look.exception()
        state.step, state.files = state.asked, None if error else look.result()
        state.never |= isinstance(error, identity.Indescribable)  # never again, whatever comes
        if error is not None:
            self._log(path, state, error)


# ---------------------------------------------------------------- the file system


def read(path: str, before: AdapterFiles | None = None) -> AdapterFiles:
    """The adapter in a local folder, in PEFT's format. Files that are still in the state ``before``
    are not read again.

    Raises OSError if there is nothing to read, and ``identity.Indescribable`` for a name on the
    Hugging Face Hub: engines fetch its newest commit whenever they load it.
    """
    folder = Path(os.path.expanduser(path))  # as engines do: what cannot be expanded is left
    if not (path.startswith(("/", "~")) or folder.exists()):
        raise identity.Indescribable("its weights can change on the Hub; give a local folder")
    now = _state(folder)
    if before is not None and now == (before.state, before.newest_ns):
        return before
    parts = []
    for file in _files(folder):
        with file.open("rb") as opened:
            parts += [file.name, hashlib.file_digest(opened, "sha256").hexdigest()]
    if _state(folder) != now:
        raise OSError("its files are being changed")
    return AdapterFiles(identity.digest(["local", *parts]), *now)


def _files(folder: Path) -> list[Path]:
    return [folder / CONFIG, *sorted(folder.glob("adapter_model.*"))]


def _state(folder: Path) -> tuple[str, int]:
    """A digest that changes with the files and with links on the way to them, and the time of the
    last change."""
    files = _files(folder)
    states = [file.stat() for file in files]
    states += [p.lstat() for p in (folder, *folder.parents, *files) if p.is_symlink()]
    parts = [os.path.realpath(folder), *(file.name for file in files)]
    parts += [str((s.st_size, s.st_mtime_ns, s.st_ctime_ns)) for s in states]
    return identity.digest(parts), max(s.st_ctime_ns for s in states)
