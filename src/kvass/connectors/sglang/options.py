"""The options of the backend. ``docs/sglang.md`` lists them, ``engine/options.py`` says where they
come from; the first source is SGLang's extra config of the storage backend.

It imports nothing of SGLang.
"""

from __future__ import annotations

from typing import ClassVar

from kvass.config import ENGINE_PREFIX, AnyEngineOptions


class StorageOptions(AnyEngineOptions, frozen=True, kw_only=True, rename=ENGINE_PREFIX.__add__):
    """``tenant``: who pays for what the engine stores. It is read from the extra config only."""

    first_source: ClassVar[str] = "hicache_storage_backend_extra_config"
    page: ClassVar[str] = "docs/sglang.md"

    tenant: str = ""
