"""A tier that does harm when a file in its folder says so. It keeps records in another tier.

X is ``open`` or a method, in the names of these files:

- ``hold-X``: it waits while the file is there. ``crash-X``: the process dies of a bad pointer;
  ``exit-X``: it exits. ``stubborn-X``: a thread waits for ever, for which Python would wait.
- ``dead``: every call raises ``TierDown``. ``raise``: every call raises what no tier may.
- ``slow``: a load or store takes a second. ``spoil``: a load writes garbage into its buffers, and
  fails. ``shut``: it cannot be opened.
- ``fork-load``: a load forks a process that writes to the buffers, and waits.

It makes ``in-X`` when X was called, ``stored`` (the number of records), ``forked``, ``closed``.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from kvass.errors import TierDown
from kvass.tiers.url import open_tier
from tests.support.tiers.memory import MemoryTier

_CALLS: Final = ("probe", "load", "store", "delete", "clear", "note", "set_note")
_LOOK_S: Final = 0.005


def url(folder: Path, inner: str = "") -> str:
    """Opens it, over the tier ``inner`` or one in memory."""
    options = f"folder={quote(str(folder))}&inner={quote(inner, safe='')}"
    return f"tests.support.tiers.faulty:FaultyTier?{options}"


class FaultyTier:
    """See the top of this file."""

    def __init__(self, folder: str, inner: str) -> None:
        self._folder = Path(folder)
        self._harm("open")
        if self._told("shut"):
            raise PermissionError(13, "shut")
        self._inner: Any = open_tier(inner) if inner else MemoryTier()
        for name in _CALLS:
            setattr(self, name, partial(self._call, name))

    def _told(self, name: str) -> bool:
        return (self._folder / name).exists()

    def _harm(self, where: str) -> None:
        (self._folder / f"in-{where}").touch()
        while self._told(f"hold-{where}"):
            time.sleep(_LOOK_S)
        if self._told(f"crash-{where}"):
            (self._folder / f"crash-{where}").unlink()
            ctypes.string_at(0)
        if self._told(f"exit-{where}"):
            sys.exit(3)
        if self._told(f"stubborn-{where}"):
            ThreadPoolExecutor(1).submit(threading.Event().wait).result()

    def _call(self, name: str, *arguments: Any) -> Any:
        self._harm(name)
        if self._told("dead"):
            raise TierDown("told to be dead")
        if self._told("raise"):
            raise RuntimeError("told to raise what no tier may")
        if name in ("load", "store") and self._told("slow"):
            time.sleep(1.0)
        if name == "load" and self._told("spoil"):
            for shards in arguments[1]:
                for shard in shards:
                    shard[: len(shard) // 2] = 0x5A
            return [False] * len(arguments[0])
        if name == "load" and self._told("fork-load"):
            self._fork(arguments[1])
        answer = getattr(self._inner, name)(*arguments)
        if name == "store":
            (self._folder / "stored").write_text(str(self.report()["kept"]))
        return answer

    def _fork(self, into: Any) -> None:
        if (child := os.fork()) == 0:
            for shards in into:
                shards[0][:] = 0xAB
            os._exit(0)
        (self._folder / "forking").write_text(str(child))
        (self._folder / "forking").rename(self._folder / "forked")  # whole once it is there
        time.sleep(60)

    def close(self) -> None:
        self._inner.close()
        (self._folder / "closed").touch()

    def report(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "kept": len(getattr(self._inner, "records", ()))}
