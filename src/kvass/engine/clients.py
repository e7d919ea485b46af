"""The connections of an engine to the daemon: its scheduler's, and each rank's. They register once
the engine's weights are named."""

from __future__ import annotations

from kvass.client.scheduler import SchedulerClient
from kvass.client.worker import WorkerClient
from kvass.engine.setup import EngineSetup
from kvass.messages import Register


def scheduler_client(setup: EngineSetup) -> SchedulerClient:
    if setup.several_nodes:
        from kvass.engine.nodes import nodes_client

        return nodes_client(setup)
    client = SchedulerClient(
        setup.socket,
        setup.register(),
        readers=setup.strategy.readers,
        spare=setup.spare,
        incomplete=True,
        daemon_uid=setup.daemon_uid,
    )
    setup.when_named(client.complete)
    return client


def worker_client(setup: EngineSetup, registration: Register) -> WorkerClient:
    """The client of the rank that ``registration`` says."""
    client = WorkerClient(setup.socket, registration, incomplete=True, daemon_uid=setup.daemon_uid)
    setup.when_named(client.complete)
    return client
