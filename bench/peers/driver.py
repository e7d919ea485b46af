"""A cache's client in a process of its own, so that each side has its own interpreter.

The parent's half is ``Driver``; ``python -m bench.peers.driver NAME FD`` is the child. A command is
one JSON object, ``{"op": ..., ...}``, over a pipe. It calls the client's method of that name, and
is answered by ``{"ok": ...}`` or ``{"error": text}``.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Final

from kvass.errors import Unavailable

CLIENTS: Final = {
    "kvass": ("bench.peers.kvass_client", "KvassClient"),
    "lmcache": ("bench.peers.lmcache_client", "LMCacheClient"),
}
_ROOT: Final = Path(__file__).parent.parent.parent
_END_S: Final = 20.0


class Driver:
    """One client's process. ``close`` ends it in good order, ``kill`` by force."""

    def __init__(self, name: str, python: str, log: Path, environment: Mapping[str, str]) -> None:
        self._pipe, theirs = Pipe()
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [python, "-m", __name__, name, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=_ROOT,
                env={**os.environ, **environment},
            )
        theirs.close()

    def call(self, op: str, timeout_s: float = 120.0, **fields: Any) -> Any:
        """What the client's method returns. Raises ``Unavailable`` if it fails, or takes longer."""
        try:
            self._pipe.send_bytes(json.dumps({"op": op, **fields}).encode())
            if not self._pipe.poll(timeout_s):
                self.kill()
                raise Unavailable(f"no answer within {timeout_s:.0f} s")
            reply = json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            status = self._process.wait()  # it has closed its end
            raise Unavailable(f"its client ended with status {status}") from None
        if "error" in reply:
            raise Unavailable(reply["error"])
        return reply["ok"]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._pipe.close()

    def close(self) -> None:
        self._pipe.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.kill()


def serve(client: Any, pipe: Connection) -> None:
    """Carry out commands until the parent closes the pipe."""
    while True:
        try:
            fields = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            reply = {"ok": getattr(client, fields.pop("op"))(**fields)}
        except Exception as error:  # noqa: BLE001 - the parent is told
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"[:300]}
        pipe.send_bytes(json.dumps(reply).encode())


def main() -> None:
    module, name = CLIENTS[sys.argv[1]]
    client = getattr(importlib.import_module(module), name)()
    serve(client, Connection(int(sys.argv[2])))
    client.close()


if __name__ == "__main__":
    main()
