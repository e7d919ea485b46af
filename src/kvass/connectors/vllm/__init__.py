"""kvass in vLLM::

    --kv-transfer-config '{"kv_connector": "KvassConnector", "kv_role": "kv_both"}'

Where ``VLLM_PLUGINS`` leaves out kvass, ``kv_connector_module_path`` names this package.

Importing this package imports nothing of vLLM. Who asks for ``KvassConnector`` gets the connector,
or, where this vLLM may not run it, ``inert.py``'s.
"""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvass.connectors.vllm.plugin import register
from kvass.connectors.vllm.served import Served, verdict_on

if TYPE_CHECKING:
    from kvass.connectors.vllm.connector import KvassConnector

__all__ = ["KvassConnector"]


def __getattr__(name: str) -> Any:
    if name != "KvassConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _connector()


@cache
def _connector() -> type:
    """The contract is checked first: where it is broken, importing may already raise."""
    import vllm

    from kvass.connectors.vllm.inert import connector_off

    register()
    verdict = verdict_on(Path(vllm.__file__ or "").parent, vllm.__version__)
    if verdict.served is Served.REFUSED:
        return connector_off(verdict.said)
    try:
        from kvass.connectors.vllm.connector import KvassConnector
    except Exception as error:  # noqa: BLE001 - what the contract does not name may be gone, too
        said = f"importing it failed: {type(error).__name__}: {error}"
        return connector_off(f"{said} (python -c 'import {__name__}.connector' shows where)")
    return KvassConnector
