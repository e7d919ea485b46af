"""kvass: KV cache as a shared service."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from kvass._version import __version__

if TYPE_CHECKING:
    from kvass.client.client import Client as Client
    from kvass.client.parallel import ParallelStrategy as ParallelStrategy
    from kvass.client.scheduler import SchedulerClient as SchedulerClient
    from kvass.client.worker import WorkerClient as WorkerClient
    from kvass.engine.pages import PageStore as PageStore
    from kvass.engine.pages import Plane as Plane
    from kvass.engine.pages import Put as Put

_PUBLIC: Final = {
    "Client": "kvass.client.client",
    "PageStore": "kvass.engine.pages",
    "ParallelStrategy": "kvass.client.parallel",
    "Plane": "kvass.engine.pages",
    "Put": "kvass.engine.pages",
    "SchedulerClient": "kvass.client.scheduler",
    "WorkerClient": "kvass.client.worker",
}

__all__ = [
    "Client",
    "PageStore",
    "ParallelStrategy",
    "Plane",
    "Put",
    "SchedulerClient",
    "WorkerClient",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """The public names, each imported when first used: ``import kvass`` itself stays cheap."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
