"""kvass in vLLM: the ``kv_connector_module_path`` that vLLM is given.

::

    --kv-transfer-config '{"kv_connector": "KvassConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "kvass.connectors.vllm"}'

Importing this package imports nothing of vLLM: only who asks for ``KvassConnector`` does.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvass.connectors.vllm.connector import KvassConnector

__all__ = ["KvassConnector"]


def __getattr__(name: str) -> Any:
    if name != "KvassConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvass.connectors.vllm.connector import KvassConnector

    return KvassConnector
