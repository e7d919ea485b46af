"""The connector with a fake GPU's mover: a ``kv_connector_module_path`` for tests.

Only the mover differs. vLLM's pages stay in host memory. Wrong use of the device ends the engine.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from kvass.connectors.vllm import blend_connector, configuration, connector
from kvass.engine.copier import Copier
from kvass.engine.memory import KVMemory
from tests.support.gpu.engine_mover import EngineMover


def open_mover(memory: KVMemory, pins: bool = True, stages: bool = False) -> EngineMover:
    """A mover that treats these pages as device memory. With ``stages`` it has them, after the
    trial of ``kvass.gpu_stages``, whatever that found: speeds of a fake say nothing."""
    mover = EngineMover(memory.regions, memory.planes, stages=stages or None)
    if stages:
        mover.try_stages()
    return mover


class KvassConnector(connector.Connector):
    """See above."""

    def __new__(cls, vllm_config: Any, role: Any, kv_cache_config: Any) -> KvassConnector:
        options = "kvass.blend", "kvass.blend_oracle"
        asked = any(configuration.asks_for(vllm_config, option) for option in options)
        made: KvassConnector = super().__new__(BlendConnector if asked else cls)
        return made

    def _make_copier(self, setup: configuration.VllmSetup, vllm_config: Any, *_: Any) -> Copier:
        return super()._make_copier(
            setup, vllm_config, partial(open_mover, stages=setup.gpu_stages)
        )

    @property
    def mover(self) -> EngineMover | None:
        """This rank's mover, once its pages are known."""
        mover = self._copier and self._copier._mover
        return mover if isinstance(mover, EngineMover) else None

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Called where a step begins."""
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
        """Wait for the engine's stream."""
        if self.mover is not None:
            self.mover.synchronize()


class BlendConnector(KvassConnector, blend_connector.BlendConnector):
    """The same with ``kvass.blend``."""
