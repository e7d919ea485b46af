"""A worker process of its own, told what to do line by line: ``python -m tests.gpu.child``.

Law of this file: each line of its standard input is a command, a JSON list; each line of its output
says what came of it, and nothing else does. It ends with its input, or by a signal.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from kvass.arena import memory
from kvass.testing.fake_rank import Transfer
from kvass.transfer.batch import Batch
from kvass.transfer.device import Fault, Stream
from tests.gpu.device import Device, Flawed, open_device
from tests.gpu.engine import DeviceEngine
from tests.gpu.rig import Rig

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 120.0
ROWS = 3


class Stalling(Flawed):
    """Gives the device ``after`` batches, and of no other anything."""

    after = 1 << 60

    def __init__(self, runtime: Any) -> None:
        super().__init__(runtime)
        self.stalled = threading.Event()

    def copy(self, stream: Stream, batch: Batch) -> Fault | None:
        if self.after == 0:
            self.stalled.set()
            time.sleep(3600)
        self.after -= 1
        fault: Fault | None = self._runtime.copy(stream, batch)
        return fault


class Worker:
    """What the commands do."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.stalling: Any = Stalling(device.runtime)
        self._engine: DeviceEngine | None = None

    def store(self, name: str, fd: int, size: int) -> str:
        """Compute the rows of a geometry and store them in the arena; the digest of the pages."""
        rig = Rig(self.device, name, ROWS, arena=memory.attach(fd, size))
        rig.compute()
        assert rig.move("store").ok
        return self._digest(rig)

    def load(self, name: str, fd: int, size: int) -> str:
        """Load them into other blocks; the digest of the pages, all of which are right."""
        rig = Rig(self.device, name, ROWS, arena=memory.attach(fd, size))
        rig.fill(0, table=1)
        assert rig.move("load", table=1).ok
        assert rig.loaded(table=1)
        return self._digest(rig, 1)

    def _digest(self, rig: Rig, table: int = 0) -> str:
        digest = rig.kv.digest(rig.tables[table])
        rig.close()
        self.device.check()
        return digest

    def expandable(self) -> bool:
        """Whether all memory that torch holds is in expandable segments, and there is some."""
        held = torch.cuda.memory_snapshot()
        return bool(held) and all(segment["is_expandable"] for segment in held)

    def engine(self, socket: str, name: str, rows: int) -> str:
        """Have an engine over a real daemon."""
        self._engine = DeviceEngine(
            socket, self.device, name, rows=rows, runtime=self.stalling, batch_bytes=1
        )
        return "connected"

    def stored(self, first: int, chunks: int) -> int:
        """Compute and store a prompt: its rows that are READY."""
        assert self._engine is not None
        return self._engine.wait(self._begin(first, chunks))

    def stall(self, first: int, chunks: int, after: int) -> str:
        """Begin to, and stop amid the copy, after so many batches."""
        self.stalling.after = after
        what = self._begin(first, chunks)
        assert self.stalling.stalled.wait(PATIENCE_S)
        assert not what.outcomes
        return "amid"

    def _begin(self, first: int, chunks: int) -> Transfer:
        assert self._engine is not None
        what = self._engine.reserve(self._prompt(first, chunks))
        assert what is not None
        self._engine.step(what)
        return what

    def _prompt(self, first: int, chunks: int) -> range:
        assert self._engine is not None
        return prompt(self._engine, first, chunks)


def prompt(engine: DeviceEngine, first: int, chunks: int) -> range:
    """Tokens that say nothing."""
    return range(first << 20, (first << 20) + chunks * engine.chunk_tokens)


# ------------------------------------------------------------ the other end


class Child:
    """Such a process, from the outside."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def ask(self, *command: str | int) -> Any:
        """Have a command carried out: what came of it. Raises AssertionError with its error."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(command), file=self.process.stdin, flush=True)
        assert select.select([self.process.stdout], [], [], PATIENCE_S)[0], f"{command} hangs"
        said = self.process.stdout.readline()
        assert said, f"{command}: it ended with {self.process.wait(PATIENCE_S)}"
        return json.loads(said)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self.process.kill()
        self.process.wait(PATIENCE_S)


@contextmanager
def child(device: str, fds: Sequence[int] = (), **env: str) -> Iterator[Child]:
    """A process on a device of that name."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.gpu.child", device],
        cwd=ROOT,
        env={**os.environ, **env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=fds,
    )
    try:
        yield Child(process)
    finally:
        process.kill()
        process.wait(PATIENCE_S)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def main() -> None:
    worker = Worker(open_device(sys.argv[1]))
    for line in sys.stdin:
        name, *rest = json.loads(line)
        command: Callable[..., Any] = getattr(worker, name)
        print(json.dumps(command(*rest)), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
