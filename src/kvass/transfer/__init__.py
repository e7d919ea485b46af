"""Movers: they carry out copy plans between engine memory and arena slots."""

from typing import Final

DEVICES: Final = frozenset({"cpu"})
"""The switch: kinds of device whose KV caches may be moved. With "cuda" here the GPU path is on
(docs/gpu.md says what must be shown first); whatever is not here runs uncached."""
