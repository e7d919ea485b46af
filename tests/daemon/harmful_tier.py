"""A tier in memory, for processes of their own, that does harm when a file in its folder says so.

``hold-X``: X (``open``, ``load``, ``store``) waits while the file is there; ``in-X`` says that it
was called. ``crash-X``: the process dies of a bad pointer. ``URL`` opens it.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.daemon.tier_rig import Memory


def url(folder: Path) -> str:
    return f"tests.daemon.harmful_tier:Harmful?folder={folder}"


class Harmful(Memory):
    def __init__(self, folder: str) -> None:
        super().__init__(self._harm)
        self.folder = Path(folder)
        while self._told("hold-open"):
            time.sleep(0.005)
        if self._told("shut"):
            raise PermissionError(13, "shut")
        if self._told("exit-open"):
            sys.exit(3)

    def _told(self, name: str) -> bool:
        return (self.folder / name).exists()

    def _harm(self, where: str) -> None:
        (self.folder / f"in-{where}").touch()
        while self._told(f"hold-{where}"):
            time.sleep(0.005)
        if self._told(f"crash-{where}"):
            (self.folder / f"crash-{where}").unlink()
            ctypes.string_at(0)
        if self._told(f"stubborn-{where}"):  # in a thread that Python waits for before it exits
            ThreadPoolExecutor(1).submit(threading.Event().wait).result()

    def probe(self, keys: Sequence[bytes]) -> list[bool]:
        return [held or self._told("boast") for held in super().probe(keys)]

    def load(self, keys: Sequence[bytes], into: Any) -> list[bool]:
        if self._told("fork-load"):
            if (child := os.fork()) == 0:
                for shards in into:
                    shards[0][:] = 0xAB
                os._exit(0)
            (self.folder / "forking").write_text(str(child))
            (self.folder / "forking").rename(self.folder / "forked")  # whole once it is there
            time.sleep(60)
        return super().load(keys, into)

    def store(self, keys: Sequence[bytes], data: Any) -> list[bool]:
        stored = super().store(keys, data)
        (self.folder / "stored").write_text(str(len(self.records)))
        return stored

    def close(self) -> None:
        (self.folder / "closed").touch()

    def report(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "kept": len(self.records)}
