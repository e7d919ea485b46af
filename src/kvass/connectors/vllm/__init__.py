"""kvass in vLLM: the ``kv_connector_module_path`` that vLLM is given.

::

    --kv-transfer-config '{"kv_connector": "KvassConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "kvass.connectors.vllm"}'
"""

from kvass.connectors.vllm.connector import KvassConnector

__all__ = ["KvassConnector"]
