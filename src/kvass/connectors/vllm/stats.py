"""Statistics of the connector for vLLM's log and its ``/metrics``.

The connector counts in the scheduler's process and in each worker's (``engine/traffic.py``). After
each step vLLM takes what was counted since the last step and adds up all processes. It passes the
sums to ``PromMetrics`` in the process that serves ``/metrics``. So bytes, seconds and copies are
sums over ranks.

A file of vLLM's version (see ``adapt.py``).
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
    """Counts since the last step: ``data`` by name of ``MEANINGS``, without zeros."""

    def reset(self) -> None:
        """Drop all counts."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> Stats:
        """Add the counts of ``other`` to this object and return it."""
        for name, number in other.data.items():
            self.data[name] = self.data.get(name, 0) + number
        return self

    def is_empty(self) -> bool:
        """Whether there are no counts."""
        return not self.data

    def reduce(self) -> dict[str, int | float]:
        """The counts in the form that vLLM logs."""
        return {name: round(number, 4) for name, number in sorted(self.data.items())}


class PromMetrics(KVConnectorPromMetrics):
    """Prometheus counters: one for each name of ``MEANINGS`` and each engine of this process."""

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
        """Add the counts that the engine ``engine_idx`` sent since the last call."""
        for name, number in transfer_stats_data.items():
            self._counters[engine_idx][name].inc(number)
