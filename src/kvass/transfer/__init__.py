"""Movers: they carry out copy plans between engine memory and arena slots."""

from typing import Final

DEVICES: Final = frozenset({"cpu"})
"""Kinds of device whose KV caches are moved; engines on others run uncached."""

ON_REQUEST: Final = frozenset({"cuda"})
"""Kinds that are moved only for who asks for it (``kvass.gpu``), because nobody has seen that work
yet; docs/gpu.md says what must be shown before they belong above."""
