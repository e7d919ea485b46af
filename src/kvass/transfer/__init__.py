"""Movers: they carry out copy plans between engine memory and arena slots."""

from typing import Final

DEVICES: Final = frozenset({"cpu"})
"""The kinds of devices whose KV caches kvass copies. Engines on other devices run uncached."""

ON_REQUEST: Final = frozenset({"cuda"})
"""The kinds of devices that are supported only if the engine sets ``kvass.gpu``, because nobody has
seen it work on a real one yet. docs/gpu.md says what must be shown before they belong above."""
