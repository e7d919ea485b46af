"""Movers: they carry out copy plans between engine memory and arena slots."""

from typing import Final

DEVICES: Final = frozenset({"cpu", "cuda", "xpu"})
"""The kinds of devices whose KV caches kvass copies, as torch names them; ROCm is ``cuda``. Engines
on other devices run uncached."""
