"""The plug-in of vLLM that registers the name ``KvassConnector``, and switches kvass on if the
environment variable ``KVASS`` is set (``opt_in.py``). ``pyproject.toml`` declares it.

Laws of this file:

- vLLM runs the plug-in in each of its processes, also if the engine does not use kvass. So
  ``register`` does not raise and does not import ``connector.py``, which vLLM imports when an
  engine needs it.
- In a MultiConnector, vLLM uses this name to find the class for a connector's statistics, even if
  the connector was configured by its module path. ``VLLM_PLUGINS`` may leave out the plug-in. So
  the package also calls ``tell_name`` when it loads the connector.
"""

from __future__ import annotations

from kvass.connectors.vllm import making, opt_in
from kvass.engine.boundary import log


def register() -> None:
    """vLLM's entry point: register the name, and note when the engine is made."""
    making.plugins_are_loaded()
    tell_name()


def tell_name() -> None:
    """Register the name with vLLM's connector factory, unless it is registered already, and wrap
    vLLM's function if ``KVASS`` is set."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        KVConnectorFactory.register_connector(
            "KvassConnector", "kvass.connectors.vllm", "KvassConnector"
        )
    except ValueError:  # already registered
        pass
    except Exception as error:  # noqa: BLE001 - another version may raise anything
        log.warning("this vLLM cannot be told the name KvassConnector: %r", error)
        return
    if not opt_in.wanted():
        return
    try:
        opt_in.wrap()
    except Exception as error:  # noqa: BLE001 - another version may raise anything
        log.warning("KVASS has no effect in this vLLM: %r", error)
