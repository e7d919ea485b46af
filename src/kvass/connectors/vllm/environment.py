"""What of a process's environment is in a namespace: variables of vLLM, and plug-ins.

``variables.py`` says which variables are left out. Any other that ``vllm.envs`` knows goes in,
unless its value is vLLM's default. A file of vLLM's version (see ``adapt.py``).
"""

from __future__ import annotations

import os
import types
from collections.abc import Callable
from importlib import metadata
from typing import Any, Final

from kvass.connectors.vllm.variables import VARIABLES
from kvass.engine import identity

PLUGIN_GROUPS: Final = ("vllm.general_plugins", "vllm.platform_plugins")
"""Groups of entry points that vLLM loads in the processes that compute. Plug-ins of its other
groups see requests before they are hashed, or outputs."""


def variables() -> str:
    """The environment variables that go into a namespace and are not at their default."""
    from vllm import envs

    skipped = VARIABLES.skipped()
    found = {}
    for name, getter in envs.environment_variables.items():
        if name in os.environ and name not in skipped:
            value = getter()
            if value != _default(getter):
                found[name] = value
    return identity.canonical(found, "environment") if found else ""


class _NoEnvironment:
    """The module ``os`` as a process without environment variables sees it."""

    environ: Final[dict[str, str]] = {}

    def getenv(self, name: str, default: str | None = None) -> str | None:
        return default

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def _default(getter: Callable[[], Any]) -> Any:
    """What ``getter`` of ``vllm.envs`` gives if its variable is not set.

    vLLM names the defaults nowhere else. Taking the variable out of the environment for a moment
    would be seen by other threads. A getter that is no plain function has no known default.
    """
    if not isinstance(getter, types.FunctionType):
        return None
    seen = getter.__globals__ | {"os": _NoEnvironment()}
    blind = types.FunctionType(
        getter.__code__, seen, getter.__name__, getter.__defaults__, getter.__closure__
    )
    return blind()


def plugins() -> str:
    """Other people's code in the processes that compute: the plug-ins that vLLM loads, by group,
    name, what they name, and their distribution's name and version.

    A plug-in whose code changes keeps its name here until its version changes.
    """
    from vllm import envs

    allowed = envs.VLLM_PLUGINS
    found = set()
    for group in PLUGIN_GROUPS:
        for entry in metadata.entry_points(group=group):
            own = entry.value.partition(":")[0].split(".")[0] == "vllm"
            if not own and (allowed is None or entry.name in allowed):
                dist = entry.dist
                of = "" if dist is None else f" of {dist.name} {dist.version}"
                found.add(f"{group} {entry.name} = {entry.value}{of}")
    return identity.canonical(sorted(found)) if found else ""
