"""The connector of vLLM: ``KvassConnector``, which an engine loads with::

    --kv-transfer-config '{"kv_connector": "KvassConnector", "kv_role": "kv_both"}'

If ``VLLM_PLUGINS`` leaves out kvass, the option ``kv_connector_module_path`` must name this
package.

Importing this package imports nothing of vLLM. The attribute ``KvassConnector`` is the class in
``entry.py``, or the inert class of ``inert.py`` if the installed vLLM cannot run the connector.
"""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvass.connectors.vllm.making import class_is_asked_for
from kvass.connectors.vllm.plugin import tell_name
from kvass.connectors.vllm.served import Served, verdict_on

if TYPE_CHECKING:
    from kvass.connectors.vllm.entry import KvassConnector

__all__ = ["KvassConnector"]


def __getattr__(name: str) -> Any:
    if name != "KvassConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    class_is_asked_for()
    return _connector()


@cache
def _connector() -> type:
    """The class that vLLM gets. The version is judged first: in a vLLM that differs from the
    contract, importing the connector may raise."""
    import vllm

    from kvass.connectors.vllm.inert import inert_connector

    tell_name()
    verdict = verdict_on(Path(vllm.__file__ or "").parent, vllm.__version__)
    if verdict.served is Served.REFUSED:
        return inert_connector(verdict.message)
    try:
        from kvass.connectors.vllm.entry import KvassConnector
    except Exception as error:  # noqa: BLE001 - the contract does not name everything
        reason = f"importing it failed: {type(error).__name__}: {error}"
        return inert_connector(f"{reason} (python -c 'import {__name__}.entry' shows where)")
    return KvassConnector
