"""LoRA adapters: which weights vLLM's hashes of their requests stand for.

vLLM hashes an adapter's name and path, and never looks again at what lies there. Here the adapter's
files are part of a request's keys: who trains it anew in the same folder shares nothing with what
was.

Laws of this file:

- An adapter's weights are what its files were at its first request in this engine. A request of it
  is served, and stored, only while they still are: then whatever the engine loaded since, or loads
  again, is the same. Once they are not, it is served no more in this engine's life: nobody tells us
  which weights are loaded, and vLLM's own cache keeps what the old ones computed.
- Only a thread of this file touches the file system, and nobody waits for it longer than ``WAIT_S``
  in a step. What is not known in time is a miss.
"""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import Future
from typing import Final

from kvass.connectors.vllm import identity
from kvass.connectors.vllm.boundary import log

WAIT_S: Final = 0.1
"""How long a step may wait for the file system, all its requests together (law 9)."""

Job = tuple[str, Future[str]]


class Adapters:
    """The adapters of one engine. Used from the engine's scheduler thread only.

    ``settings`` are those of the engine that change what an adapter computes.
    """

    def __init__(self, settings: str = "") -> None:
        self._settings = settings
        self._first: dict[tuple[str, str], str] = {}
        self._changed: set[tuple[str, str]] = set()
        self._said: set[tuple[str, str]] = set()
        self._seen: dict[str, str] = {}
        self._wait_s = self._left_s = WAIT_S
        self._late: Future[str] | None = None
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def salt(self, name: str, path: str) -> bytes | None:
        """What to mix into the hashes of this adapter's requests; None: it cannot be served now."""
        key = name, path
        if key in self._changed or not (now := self._look(key)):
            return None
        if now != self._first.setdefault(key, now):
            self._changed.add(key)
            log.warning(
                "LoRA adapter %s: the files in %s changed under a running engine; its requests run "
                "uncached until the engine starts anew, so give changed weights a new path",
                *key,
            )
            return None
        return bytes.fromhex(identity.digest([self._settings, now]))

    def new_step(self) -> None:
        """What was seen may have changed by the next step."""
        self._seen.clear()
        self._left_s = self._wait_s

    def close(self) -> None:
        """End the thread, unless the file system holds it."""
        self._jobs.put(None)

    def _look(self, key: tuple[str, str]) -> str:
        """What lies at the path now; empty if that is not known."""
        _, path = key
        if path not in self._seen:
            self._seen[path] = "" if self._stuck() else self._ask(key)
        return self._seen[path]

    def _stuck(self) -> bool:
        """Whether the thread still works on what came too late; that answer is of no use now."""
        return self._late is not None and not self._late.done()

    def _ask(self, key: tuple[str, str]) -> str:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="kvass-adapters", daemon=True)
            self._thread.start()
        job: Future[str] = Future()
        since = time.monotonic()
        self._jobs.put((key[1], job))
        try:
            return job.result(self._left_s)
        except TimeoutError:
            self._late = job
            self._say(key, "its files could not be looked at in time")
        except (OSError, ValueError) as error:
            self._say(key, error)
        finally:
            self._left_s = max(0.0, self._left_s - (time.monotonic() - since))
        return ""

    def _say(self, key: tuple[str, str], why: object) -> None:
        if key not in self._said:
            self._said.add(key)
            log.warning("LoRA adapter %s of %s runs uncached: %s", *key, why)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            path, answer = job
            try:
                answer.set_result(identity.adapter_weights(path))
            except (OSError, ValueError) as error:
                answer.set_exception(error)
