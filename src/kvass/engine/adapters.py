"""LoRA adapters: the digest of an adapter's weights, to be mixed into its requests' chunk hashes.

Engines hash an adapter's name and path only, and do not look again at what lies there. With this
digest an adapter that is trained anew in the same folder shares nothing with the old one.

Laws of this file:

- An adapter's weights are what its files held at its first request in this engine, if they did not
  change after the engine started. Its requests are loaded and stored only while the files stay
  unchanged: then all that the engine has loaded, or loads again, is the same. An adapter whose
  files changed is uncached for the engine's life, because no engine tells which weights it has
  loaded, and its own prefix cache keeps what the old ones computed.
- A look at the files counts only for what was first needed in the same step or before.
- Only the thread of this file touches the file system. The engine waits for it at most ``WAIT_S``
  in a step, and only for paths that were quick when last looked at. One look per path is under way
  at a time, in the order of asking. A slow or failing path is left alone for a while.
"""

from __future__ import annotations

import enum
import queue
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from kvass.engine import adapter_files, identity
from kvass.engine.adapter_files import AdapterFiles
from kvass.engine.boundary import log

WAIT_S: Final = 0.005
"""How long a step may wait for the file system, for all its requests together."""

PATIENCE_S: Final = 0.25
"""How long a request may be told to ask again because of one look."""

PAUSE_S: Final = 0.25
MAX_PAUSE_S: Final = 60.0
"""How long a path is left alone after a slow or failed look; twice as long after each further
one."""


class NoSalt(enum.Enum):
    """Why an adapter's requests cannot be cached."""

    PENDING = "a look is under way: ask again"
    UNKNOWN = "nothing is known of its files at present"
    NEVER = "nor will it be while this engine runs"


@dataclass
class Look:
    """The result of a look. ``took_s``: without the time in the queue."""

    files: AdapterFiles | None
    error: Exception | None
    took_s: float


@dataclass
class PathState:
    """What is known of one path. ``step`` is that of the last look that has answered. ``asked`` and
    ``asked_s`` belong to the look under way, ``job``. ``quick``: it is worth waiting for."""

    files: AdapterFiles | None = None
    step: int = -1
    job: Future[Look] | None = None
    asked: int = -1
    asked_s: float = 0.0
    quick: bool = True
    pause_s: float = 0.0
    again_s: float = 0.0


Job = tuple[str, AdapterFiles | None, Future[Look]]


class Adapters:
    """The adapters of one engine. Used from the engine's scheduler thread only.

    ``settings`` are those of the engine that change what an adapter computes. ``step`` counts the
    engine's steps.
    """

    def __init__(self, settings: str = "") -> None:
        self.step = 0
        self._settings = settings
        self._began_ns = time.time_ns()
        self._salts: dict[tuple[str, str], tuple[str, bytes]] = {}
        self._never: set[tuple[str, str]] = set()
        self._logged: set[tuple[str, str]] = set()
        self._paths: dict[str, PathState] = {}
        self._wait_s = self._left_s = WAIT_S
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def salt(self, name: str, path: str, since: int) -> bytes | NoSalt:
        """What to mix into the hashes of this adapter's requests. ``since``: the step in which it
        was first needed; an older look does not count."""
        key = name, path
        if key in self._never:
            return NoSalt.NEVER
        state = self._paths.setdefault(path, PathState())
        self._collect(key, state)
        if state.job is None and state.step < self.step and time.monotonic() >= state.again_s:
            self._ask(path, state)
        if state.step < since:
            self._wait(key, state)
        if key in self._never:
            return NoSalt.NEVER
        if state.files is not None and state.step >= since:
            return self._salt_of(key, state.files)
        if state.job is None:
            return NoSalt.UNKNOWN
        if time.monotonic() - state.asked_s < PATIENCE_S:
            return NoSalt.PENDING
        self._log(key, "its files could not be looked at in time")
        return NoSalt.UNKNOWN

    def new_step(self) -> None:
        """A step begins: files may have changed, and the step may wait anew."""
        self.step += 1
        self._left_s = self._wait_s

    def close(self) -> None:
        """End the thread, unless the file system blocks it."""
        self._jobs.put(None)

    # ------------------------------------------------------------ what was seen

    def _salt_of(self, key: tuple[str, str], now: AdapterFiles) -> bytes | NoSalt:
        """The salt, if the files are what they were at the adapter's first request."""
        if key not in self._salts:
            if now.newest_ns > self._began_ns:
                return self._give_up(
                    key, "its files are younger than this engine, which may have read others before"
                )
            salt = bytes.fromhex(identity.digest([self._settings, now.content]))
            self._salts[key] = now.state, salt
        first, salt = self._salts[key]
        if now.state != first:
            return self._give_up(key, "its files changed under a running engine")
        return salt

    def _give_up(self, key: tuple[str, str], why: str) -> NoSalt:
        self._never.add(key)
        log.warning(
            "LoRA adapter %s of %s runs uncached until the engine restarts: %s; "
            "give changed weights a new path",
            *key,
            why,
        )
        return NoSalt.NEVER

    def _log(self, key: tuple[str, str], why: object) -> None:
        if key not in self._logged:
            self._logged.add(key)
            log.warning("LoRA adapter %s of %s runs uncached: %s", *key, why)

    # ------------------------------------------------------------ looks

    def _ask(self, path: str, state: PathState) -> None:
        """Have the thread look."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="kvass-adapters", daemon=True)
            self._thread.start()
        state.job, state.asked, state.asked_s = Future(), self.step, time.monotonic()
        self._jobs.put((path, state.files, state.job))

    def _wait(self, key: tuple[str, str], state: PathState) -> None:
        """Wait for a quick path, for the time that is left of this step's."""
        if state.job is None or not state.quick or self._left_s <= 0:
            return
        began_s = time.monotonic()
        try:
            state.job.result(self._left_s)
        except TimeoutError:
            state.quick = False
        self._left_s = max(0.0, self._left_s - (time.monotonic() - began_s))
        self._collect(key, state)

    def _collect(self, key: tuple[str, str], state: PathState) -> None:
        """Take the result of the look under way, if it is there."""
        if state.job is None or not state.job.done():
            return
        look, state.job = state.job.result(), None
        state.step, state.files = state.asked, look.files
        state.quick = look.took_s <= self._wait_s
        if isinstance(look.error, identity.Indescribable):
            self._never.add(key)
        if look.error is not None:
            self._log(key, look.error)
        if look.error is None and look.took_s <= PATIENCE_S:
            state.pause_s = 0.0
            return
        state.pause_s = min(2 * state.pause_s or PAUSE_S, MAX_PAUSE_S)
        state.again_s = time.monotonic() + state.pause_s

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            path, before, answer = job
            began_s = time.monotonic()
            files, failed = None, None
            try:
                files = adapter_files.read(path, before)
            except Exception as error:  # noqa: BLE001 - whatever it is, the thread must live on
                failed = error
            answer.set_result(Look(files, failed, time.monotonic() - began_s))
