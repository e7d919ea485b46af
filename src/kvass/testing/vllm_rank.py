"""A worker rank without an engine: our connector's worker side over real torch memory.

Law of this file: the forward pass is the test's (it writes bytes into pages); the copies, the arena
and the reports are real.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

TIMEOUT_S = 30.0


class Rank:
    """Rank 0 of the engine that ``config`` and ``caches`` describe (``make_configs``).

    ``pages``: uint8 of shape ``(layers, blocks, page_bytes)``, the KV memory itself.
    """

    def __init__(self, config: Any, caches: Any) -> None:
        import torch

        from kvass.connectors.vllm import KvassConnector
        from kvass.connectors.vllm.adapt import KVConnectorRole

        (tensor,) = caches.kv_cache_tensors
        memory = torch.zeros(tensor.size, dtype=torch.uint8)
        self.pages: npt.NDArray[np.uint8] = memory.numpy().reshape(
            len(tensor.layers), caches.num_blocks, -1
        )
        self.connector = KvassConnector(config, KVConnectorRole.WORKER, caches)
        self.connector.register_kv_caches(
            {name: memory[i * tensor.layer_stride :] for i, name in enumerate(tensor.layers)}
        )

    def run(self, work: Any) -> dict[str, Any]:
        """One step's hooks, as the model runner calls them; the answer for ``World.finish``."""
        self.connector.bind_connector_metadata(work)
        self.connector.start_load_kv(None)
        self.connector.wait_for_save()
        ended = self.connector.get_transfer_results(set())
        report = self.connector.build_connector_worker_meta()
        self.connector.clear_connector_metadata()
        return {
            "reported": list(report.steps) if report is not None else [],
            "received": ended.finished_recving - ended.failed_recving,
            "failed": ended.failed_recving,
        }

    def close(self) -> None:
        """As at the engine's end."""
        self.connector.shutdown()


def until(condition: Callable[[], Any], what: str) -> None:
    """Wait for ``condition``. Raises ``AssertionError`` naming ``what``."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"in vain: {what}"
        time.sleep(0.005)
