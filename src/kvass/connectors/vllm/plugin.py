"""Makes ``KvassConnector`` a name that vLLM knows: the plug-in that ``pyproject.toml`` declares.

Laws of this file:

- vLLM runs it in each of its processes, whether its engine uses kvass or not: nothing is imported
  before vLLM asks, and nothing raised.
- Inside a MultiConnector vLLM looks statistics up by this name, also of a connector that was given
  by its module's path. So whoever loads the connector calls ``register``, too: ``VLLM_PLUGINS`` may
  leave the plug-in out.
"""

from __future__ import annotations

from kvass.engine.boundary import log


def register() -> None:
    """Tell vLLM's factory the name, if it does not know it."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        KVConnectorFactory.register_connector(
            "KvassConnector", "kvass.connectors.vllm", "KvassConnector"
        )
    except ValueError:  # it knows it
        pass
    except Exception as error:  # noqa: BLE001 - what it is in another version is not known
        log.warning("this vLLM cannot be told the name KvassConnector: %r", error)
