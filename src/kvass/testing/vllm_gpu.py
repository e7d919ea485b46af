"""The connector over a fake GPU: the ``kv_connector_module_path`` of tests, and of nobody else.

Law of this file: only the mover is another one. vLLM's pages stay where they are, in memory of the
host; what is wrong with how the device is used ends the engine.
"""

from __future__ import annotations

from typing import Any

from kvass.connectors.vllm import configuration, connector
from kvass.engine.copier import Copier
from kvass.engine.memory import KVMemory
from kvass.testing.engine_gpu import EngineMover


def open_mover(memory: KVMemory) -> EngineMover:
    """What copies these pages, as if they were a GPU's."""
    return EngineMover(memory.regions, memory.planes)


class KvassConnector(connector.KvassConnector):
    """See above."""

    def _make_copier(self, setup: configuration.VllmSetup, vllm_config: Any) -> Copier:
        rank = configuration.worker_rank(vllm_config)
        return Copier(setup, rank, self._boundary, open_mover)

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
