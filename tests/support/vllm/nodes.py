"""A real vLLM engine over several nodes: a process tree and a daemon for each, on one machine.

The trees are started as on machines of their own: ``-tp 2 --nnodes 2``, the second ``--headless``,
with torch's rendezvous and vLLM's messages over TCP. Each tree's environment names its own daemon.
"""

from __future__ import annotations

import select
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from kvass.testing.daemon import Daemon, running_daemon
from tests.support.servers.server import free_port
from tests.support.vllm.process import EngineDied, EngineProcess, children

HOST: Final = "127.0.0.1"
PORTS: Final = (20_000, 32_000)


@contextmanager
def running_daemons(
    folder: Path, l1_sizes: Sequence[str], **options: Any
) -> Iterator[list[Daemon]]:
    """A daemon for each node, with an L1 of this size; ``options`` are of all."""
    with ExitStack() as ending:
        daemons = []
        for node, size in enumerate(l1_sizes):
            (own := folder / str(node)).mkdir(parents=True)
            daemons.append(ending.enter_context(running_daemon(own, size, **options)))
        yield daemons


class Headless(EngineProcess):
    """A node with ranks and no scheduler. It answers nothing: its pipes show that it lives."""

    child = "tests.support.vllm.headless"


class NodesEngine(EngineProcess):
    """One engine whose node ``n`` uses the daemon at ``sockets[n]``; this process is the first
    node, with the scheduler. A node has one rank, unless ``args`` say otherwise. ``log`` is the
    first node's; those of the others stand beside it (``logs``). ``fields``: as for
    ``EngineProcess``. ``others``: the models of the other nodes, if they are to contradict the
    first."""

    def __init__(
        self,
        model: Path,
        log: Path,
        sockets: Sequence[Path],
        *,
        args: Mapping[str, Any] | None = None,
        others: Sequence[Path] = (),
        variables: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> None:
        nodes = {
            "tensor_parallel_size": len(sockets),
            "distributed_executor_backend": "mp",
            "nnodes": len(sockets),
            "master_addr": HOST,
            "master_port": free_port(*PORTS),
        }
        self.logs = [log, *(log.with_suffix(f".{n}.log") for n in range(1, len(sockets)))]
        self.others: list[Headless] = []

        def of(node: int) -> dict[str, Any]:
            return {
                **fields,
                "socket": sockets[node],
                "args": {**nodes, **(args or {}), "node_rank": node},
                "variables": {
                    **(variables or {}),
                    "KVASS_SOCKET": str(sockets[node]),
                    "VLLM_HOST_IP": HOST,
                },
            }

        for node, path in enumerate(self.logs[1:], 1):
            theirs = others[node - 1] if others else model
            self.others.append(Headless(theirs, path, **of(node)))
        super().__init__(model, log, **of(0))
        self._sockets = list(sockets)

    def wait_ready(self) -> EngineProcess:
        """Wait until the engine answers: all nodes are up then."""
        super().wait_ready()
        for other in self.others:
            other._workers = other._workers or children(other.pid)
        return self

    def log(self, node: int = 0) -> str:
        """What a node has logged."""
        return self.logs[node].read_text(errors="replace")

    def kill(self) -> None:
        """``kill -9`` all processes of all nodes. Idempotent."""
        super().kill()
        for other in self.others:
            other.kill()

    def close(self) -> int:
        """End the first node in good order, then the others."""
        status = super().close()
        for other in self.others:
            other.close()
        return status

    def _read(self, timeout_s: float) -> Any:
        """Its answer, or at once the end of another node, without which none would come."""
        own, *theirs = (_output(one) for one in (self, *self.others))
        if not self._buffer:
            ready = select.select([own, *theirs], [], [], timeout_s)[0]
            if ready and own not in ready:
                raise self._died(f"lost node {1 + theirs.index(ready[0])}")
        return super()._read(timeout_s)

    def _died(self, how: str) -> EngineDied:
        ends = [f"node {n}:\n{self.log(n)[-2000:]}" for n in range(1, len(self.logs))]
        return EngineDied("\n".join([str(super()._died(how)), *ends]))


def _output(one: EngineProcess) -> int:
    stream = one._child.stdout
    assert stream is not None
    return stream.fileno()
