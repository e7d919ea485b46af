"""What an engine did with kvass, for vLLM's own log and ``/metrics``.

Each half of the connector counts (``engine/traffic.py``). vLLM takes what was counted since it
asked last, adds up scheduler and ranks, and hands it to ``PromMetrics`` in the process that serves
``/metrics``. Bytes, seconds and copies are those of all ranks together.
"""

from __future__ import annotations

from typing import Any, Final

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvass.engine.traffic import MEANINGS

PREFIX: Final = "vllm:kvass_"


class Stats(KVConnectorStats):
    """``data``: numbers by a name of ``MEANINGS``; those that are 0 are left out."""

    def reset(self) -> None:
        """Forget all."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> Stats:
        """Both together, in this object."""
        for name, number in other.data.items():
            self.data[name] = self.data.get(name, 0) + number
        return self

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not self.data

    def reduce(self) -> dict[str, int | float]:
        """What vLLM's log says of the last seconds."""
        return {name: round(number, 4) for name, number in sorted(self.data.items())}


class PromMetrics(KVConnectorPromMetrics):
    """A counter for each name of ``MEANINGS``, for each engine of this process."""

    def __init__(self, vllm_config: Any, types: Any, labels: list[str], values: Any) -> None:
        super().__init__(vllm_config, types, labels, values)
        counters = {
            name: types[Counter](name=PREFIX + name, documentation=text, labelnames=labels)
            for name, text in MEANINGS.items()
        }
        self._counters = {
            engine: {name: counter.labels(*own) for name, counter in counters.items()}
            for engine, own in values.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what an engine did since the last call."""
        for name, number in transfer_stats_data.items():
            self._counters[engine_idx][name].inc(number)
