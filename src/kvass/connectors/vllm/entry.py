"""``KvassConnector``, the class that vLLM loads, and the classes that options choose.

Law of this file: it imports the connectors, and none of them imports it. What an option asks for is
imported only if the option is set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kvass.connectors.vllm.configuration import asks_for, on_several_machines
from kvass.connectors.vllm.connector import Connector


def _blend() -> type[Connector]:
    from kvass.connectors.vllm.blend_connector import BlendConnector

    return BlendConnector


def _shadow() -> type[Connector]:
    from kvass.connectors.vllm.shadow_connector import ShadowConnector

    return ShadowConnector


CLASSES: Final[dict[str, Callable[[], type[Connector]]]] = {
    "kvass.blend": _blend,
    "kvass.blend_oracle": _blend,
    "kvass.shadow": _shadow,
}
"""The class of the connector, by the first of these options that is set."""


class KvassConnector(Connector):
    """vLLM's connector to the kvass daemon. It loads KV pages that any engine on this machine
    computed, and stores the pages that this engine computes.

    Raises :class:`kvass.errors.ConfigError` at start for an option that cannot be used.
    """

    def __new__(cls, vllm_config: Any = None, *args: Any, **kwargs: Any) -> Any:
        """A connector of the class that the options choose, else an instance of ``cls``. A subclass
        is never replaced. On several machines it is one of ``NodesConnector``, too."""
        for option, find in CLASSES.items() if cls is KvassConnector else ():
            if asks_for(vllm_config, option):
                return find()(vllm_config, *args, **kwargs)
        if vllm_config is not None and on_several_machines(vllm_config):
            from kvass.connectors.vllm.nodes_connector import NodesConnector

            if not issubclass(cls, NodesConnector):
                cls = type(cls.__name__, (cls, NodesConnector), {"__module__": cls.__module__})
        return super().__new__(cls)
