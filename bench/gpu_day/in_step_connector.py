"""kvass's connector with loads inside steps on a device: a ``kv_connector_module_path``.

Shipped, a device's loads are asynchronous (docs/decisions/052). Here the engine's thread waits for
the copy, so a late one is known before the forward pass. This shows what it would be worth, and
what it costs: the device computes nothing while it copies.
"""

from __future__ import annotations

from typing import Any

from kvass.connectors.vllm import connector
from kvass.engine.copier import Copier
from kvass.engine.memory import KVMemory
from kvass.transfer.base import Job, Mover
from kvass.transfer.device_mover import DeviceMover
from tests.support.vllm import fake_gpu_connector


class Waiting(DeviceMover):
    """A mover whose ``copy_now`` waits for its copy thread."""

    copies_now = True

    def copy_now(self, job: Job) -> None:
        self.submit(job)
        with self._changed:
            self._changed.wait_for(lambda: any(done.job.name is job.name for done in self._settled))


def waiting(mover: Mover) -> Mover:
    """The same mover, which waits where it is asked to."""
    mover.__class__ = type("InStep", (Waiting, type(mover)), {})
    return mover


class KvassConnector(fake_gpu_connector.KvassConnector):
    """On a GPU; pages in host memory are on a fake one."""

    def _make_copier(self, setup: Any, vllm_config: Any, *_: Any) -> Copier:
        def make(memory: KVMemory, pins: bool = True) -> Mover:
            found = connector._open_mover if memory.gpu else fake_gpu_connector.open_mover
            return waiting(found(memory, pins))

        return connector.Connector._make_copier(self, setup, vllm_config, make)
