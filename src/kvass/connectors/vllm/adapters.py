"""LoRA adapters: which weights vLLM's hashes of their requests stand for.

vLLM hashes an adapter's name and path, and never looks again at what lies there. Here the adapter's
files are part of a request's keys: who trains it anew in the same folder shares nothing with what
was.

Laws of this file:

- An adapter's weights are what its files were at its first request in this engine, if they were
  that before the engine began; and a request of it is served, and stored, only while they still
  are. Then whatever the engine loaded, or loads again, is the same. Any other adapter is never
  served in this engine's life: nobody tells us which weights are loaded, and vLLM's own cache keeps
  what other ones computed.
- A look goes for what was needed in the step in which it was asked for, or before: no look that is
  older than the need counts.
- Only a thread of this file touches the file system. Nobody waits for it, but ``WAIT_S`` in a step
  for paths that answered so quickly when they were last looked at. One look of a path is on its way
  at a time, in the order they were asked for, and a path that is slow or fails is left alone for a
  while.
"""

from __future__ import annotations

import enum
import queue
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from kvass.connectors.vllm import identity
from kvass.connectors.vllm.boundary import log
from kvass.connectors.vllm.identity import Weights

WAIT_S: Final = 0.005
"""How long a step may wait for the file system, all its requests together (law 9)."""

PATIENCE_S: Final = 0.25
"""How long a request may be told to ask again for the sake of one look."""

PAUSE_S: Final = 0.25
MAX_PAUSE_S: Final = 60.0
"""A path is left alone so long after a slow or failed look, twice as long after each other one."""


class No(enum.Enum):
    """Why an adapter's requests cannot be served."""

    YET = "a look is on its way: ask again"
    NOW = "nothing is known of its files at present"
    EVER = "nor will it be in this engine's life"


@dataclass
class Look:
    """What a look came to. ``took_s``: without the time in the queue."""

    weights: Weights | None
    error: Exception | None
    took_s: float


@dataclass
class Files:
    """What is known of one path. ``step`` is that of the last look that has answered, ``asked`` and
    ``asked_s`` belong to the ``job`` on its way. ``quick``: it is worth waiting for."""

    weights: Weights | None = None
    step: int = -1
    job: Future[Look] | None = None
    asked: int = -1
    asked_s: float = 0.0
    quick: bool = True
    pause_s: float = 0.0
    again_s: float = 0.0


Job = tuple[str, Weights | None, Future[Look]]


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
        self._said: set[tuple[str, str]] = set()
        self._files: dict[str, Files] = {}
        self._wait_s = self._left_s = WAIT_S
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def salt(self, name: str, path: str, since: int) -> bytes | No:
        """What to mix into the hashes of this adapter's requests, for what is needed since the step
        ``since``."""
        key = name, path
        if key in self._never:
            return No.EVER
        files = self._files.setdefault(path, Files())
        self._collect(key, files)
        if files.job is None and files.step < self.step and time.monotonic() >= files.again_s:
            self._ask(path, files)
        if files.step < since:
            self._wait(key, files)
        if key in self._never:
            return No.EVER
        if files.weights is not None and files.step >= since:
            return self._salt_of(key, files.weights)
        if files.job is None:
            return No.NOW
        if time.monotonic() - files.asked_s < PATIENCE_S:
            return No.YET
        self._say(key, "its files could not be looked at in time")
        return No.NOW

    def new_step(self) -> None:
        """What was seen may have changed by the next step."""
        self.step += 1
        self._left_s = self._wait_s

    def close(self) -> None:
        """End the thread, unless the file system holds it."""
        self._jobs.put(None)

    # ------------------------------------------------------------ what was seen

    def _salt_of(self, key: tuple[str, str], now: Weights) -> bytes | No:
        """Judge what lies at the path now by what lay there first."""
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

    def _give_up(self, key: tuple[str, str], why: str) -> No:
        self._never.add(key)
        log.warning(
            "LoRA adapter %s of %s runs uncached until the engine starts anew: %s; "
            "give changed weights a new path",
            *key,
            why,
        )
        return No.EVER

    def _say(self, key: tuple[str, str], why: object) -> None:
        if key not in self._said:
            self._said.add(key)
            log.warning("LoRA adapter %s of %s runs uncached: %s", *key, why)

    # ------------------------------------------------------------ looks

    def _ask(self, path: str, files: Files) -> None:
        """Have the thread look."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="kvass-adapters", daemon=True)
            self._thread.start()
        files.job, files.asked, files.asked_s = Future(), self.step, time.monotonic()
        self._jobs.put((path, files.weights, files.job))

    def _wait(self, key: tuple[str, str], files: Files) -> None:
        """Give a quick path the time that is left of this step's."""
        if files.job is None or not files.quick or self._left_s <= 0:
            return
        began_s = time.monotonic()
        try:
            files.job.result(self._left_s)
        except TimeoutError:
            files.quick = False
        self._left_s = max(0.0, self._left_s - (time.monotonic() - began_s))
        self._collect(key, files)

    def _collect(self, key: tuple[str, str], files: Files) -> None:
        """Take the answer, if it is there."""
        if files.job is None or not files.job.done():
            return
        look, files.job = files.job.result(), None
        files.step, files.weights = files.asked, look.weights
        files.quick = look.took_s <= self._wait_s
        if isinstance(look.error, identity.Indescribable):
            self._never.add(key)
        if look.error is not None:
            self._say(key, look.error)
        if look.error is None and look.took_s <= PATIENCE_S:
            files.pause_s = 0.0
            return
        files.pause_s = min(2 * files.pause_s or PAUSE_S, MAX_PAUSE_S)
        files.again_s = time.monotonic() + files.pause_s

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            path, before, answer = job
            began_s = time.monotonic()
            weights, failed = None, None
            try:
                weights = identity.adapter_weights(path, before)
            except Exception as error:  # noqa: BLE001 - whatever it is, the thread must live on
                failed = error
            answer.set_result(Look(weights, failed, time.monotonic() - began_s))
