"""A name for an engine's weights by their content: equal files have equal names, wherever they lie.

Laws of this file:

- A name says what the engine has loaded, or there is no name. The files are read after the engine
  has read them. So files that changed since this process started, or while they are read here,
  have no name.
- Each process of an engine finds the same name by itself. Where the files lie and when they were
  written does not count.
- The engine's own threads read no weight file.

The name contains the SHA-256 of each file, because the Hugging Face Hub names large files by it:
then the Hub's client has noted it, and it need not be computed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

from kvass.engine import file_digests, identity
from kvass.engine.identity import Indescribable

READY_S: Final = 2.0
"""How long the start of an engine waits for a name. Of many gigabytes it comes later."""
NICE: Final = 10
"""By how much the niceness of the hashing thread is raised, for the engine's threads."""
NAME_IT: Final = "set kvass.model_id to a name of your own for these weights"


class WeightFiles(Protocol):
    """Weights in a folder, or in one file."""

    @property
    def root(self) -> Path:
        """The folder or the file."""
        ...

    def files(self) -> Mapping[str, Path]:
        """The files that count, by name relative to the root, in a fixed order. Empty if none of
        them holds weights. Raises OSError."""
        ...


Source = str | WeightFiles
"""The weights of one model: their name, if it is known at once, or their files."""


def begin(sources: tuple[Source, ...]) -> Future[str]:
    """Name these weights, on a thread that reads what must be read.

    The result is the name, or ``Indescribable`` with the reason. Cancel it to end the thread. Its
    callbacks run on another thread, of normal priority: threads that they start inherit it.
    """
    name: Future[str] = Future()
    threading.Thread(target=_run, args=(name, sources), name="kvass-weights", daemon=True).start()
    return name


def wait(name: Future[str]) -> None:
    """Wait up to ``READY_S`` for ``name``. Raises ``Indescribable`` if there is none by then; the
    name may also fail later."""
    with suppress(TimeoutError):
        name.result(READY_S)


def _run(name: Future[str], sources: tuple[Source, ...]) -> None:
    hashed: Future[str] = Future()
    args = hashed, sources, name.cancelled
    threading.Thread(target=_hash, args=args, name="kvass-hashing", daemon=True).start()
    try:
        named = hashed.result()
    except file_digests.Stopped:
        return
    except Exception as error:  # noqa: BLE001 - whatever it is, who waits must hear of it
        _settle(name.set_exception, error)
    else:
        _settle(name.set_result, named)


def _hash(hashed: Future[str], sources: tuple[Source, ...], stopped: Callable[[], bool]) -> None:
    with suppress(OSError):  # on Linux this is the thread's own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    try:
        hashed.set_result(name_of(sources, stopped))
    except Exception as error:  # noqa: BLE001 - ``_run`` hands it on
        hashed.set_exception(error)


def _settle(set_: Callable[[Any], None], value: Any) -> None:
    with suppress(InvalidStateError):  # cancelled: nobody waits any more
        set_(value)


def name_of(sources: tuple[Source, ...], stopped: Callable[[], bool] = lambda: False) -> str:
    """The name of these weights. Raises ``Indescribable``, and ``file_digests.Stopped`` when
    ``stopped`` says so."""
    try:
        return identity.canonical(
            [source if isinstance(source, str) else _content(source, stopped) for source in sources]
        )
    except OSError as error:
        raise Indescribable(f"the weight files cannot be read: {error}") from error


def _content(weights: WeightFiles, stopped: Callable[[], bool]) -> str:
    """The digest of the files' names and contents."""
    files = weights.files()
    if not files:
        raise Indescribable(f"no weight files are in {weights.root}: {NAME_IT}")
    seen = _unchanged(weights, files)
    parts = []
    for name, file in files.items():
        noted = file_digests.noted(weights.root, name, file)
        parts += [name, noted or file_digests.sha256(file, stopped)]
    if _unchanged(weights, weights.files()) != seen:
        raise _changed(weights)
    return "sha256:" + identity.digest(parts)


def _unchanged(weights: WeightFiles, files: Mapping[str, Path]) -> file_digests.Snapshot:
    seen = file_digests.look(weights.root, files)
    if seen.changed_ns > file_digests.started_ns():
        raise _changed(weights)
    return seen


def _changed(weights: WeightFiles) -> Indescribable:
    return Indescribable(
        f"the weight files in {weights.root} changed since this engine started, so it may have "
        "loaded others: restart the engine"
    )
