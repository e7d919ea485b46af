"""The connector over a fake GPU: the ``kv_connector_module_path`` of tests, and of nobody else.

Law of this file: only the mover is another one. vLLM's pages stay where they are, in memory of the
host; what is wrong with how the device is used ends the engine.
"""

from __future__ import annotations

from typing import Any

from kvass.connectors.vllm import connector, engine, worker
from kvass.connectors.vllm.memory import Memory
from tests.support.gpu.engine_mover import EngineMover


def open_mover(memory: Memory) -> EngineMover:
    """What copies these pages, as if they were a GPU's."""
    return EngineMover(memory.regions, memory.planes)


class KvassConnector(connector.KvassConnector):
    """See above."""

    def _copies(self, setup: engine.Setup, vllm_config: Any) -> worker.WorkerSide:
        rank = engine.worker_rank(vllm_config)
        return worker.WorkerSide(setup, rank, self._boundary, open_mover)

    @property
    def mover(self) -> EngineMover | None:
        """This rank's, once its pages are known."""
        mover = self._copier and self._copier._mover
        return mover if isinstance(mover, EngineMover) else None

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Where a step begins."""
        super().handle_preemptions(kv_connector_metadata)
        if self.mover is not None:
            self.mover.begin_step()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        ended = super().get_transfer_results(finished_req_ids)
        if self.mover is not None:
            self.mover.check()
        return ended

    def shutdown(self) -> None:
        super().shutdown()
        if self.mover is not None:
            self.mover.check_closed()

    def synchronize(self) -> None:
        """Wait for what the engine's stream was given."""
        if self.mover is not None:
            self.mover.synchronize()
