"""The connector of SGLang: ``KvassStorage``, a storage backend of its hierarchical cache, HiCache.

SGLang loads it as its ``dynamic`` backend, by the names of this package and of the class
(docs/sglang.md), or because the variable ``KVASS`` is set (``plugin.py``). Importing this package
imports neither torch nor SGLang.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvass.connectors.sglang.storage import KvassStorage

__all__ = ["KvassStorage"]


def __getattr__(name: str) -> Any:
    if name != "KvassStorage":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvass.connectors.sglang.storage import KvassStorage

    return KvassStorage
