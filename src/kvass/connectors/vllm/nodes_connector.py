"""``NodesConnector``, the connector of an engine on several machines.

A file of vLLM's version (see ``adapt.py``). It is imported only in such an engine. What the
scheduler sends to daemons of other machines, and what they answer, is a part of what vLLM sends to
the workers and gets from them (``engine/nodes.py``).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any

from kvass.client.nodes import NodesClient
from kvass.client.reached import RankNews
from kvass.connectors.vllm import rest
from kvass.connectors.vllm.adapt import StepMetadata, StepReport
from kvass.connectors.vllm.connector import Connector
from kvass.connectors.vllm.stats import Stats
from kvass.engine.node_rank import NodeRank
from kvass.engine.nodes import NodesWork, SharedWork, share_out, to_send
from kvass.engine.planner import Planner
from kvass.engine.setup import EngineSetup
from kvass.engine.step_work import Load


@dataclass
class NodesMetadata(SharedWork, StepMetadata):
    """A step's work by node. vLLM pickles it."""


class NodesConnector(Connector):
    """vLLM's connector for an engine on several machines."""

    _metadata = NodesMetadata

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._node_rank: NodeRank | None = None
        if self._copier is not None:
            self._node_rank = NodeRank(self._copier, self._boundary)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """The step's loads and stores by node, and what agents pass on."""
        work = super().build_connector_meta(scheduler_output)
        if isinstance(work, NodesMetadata) and self._setup is not None:
            work.nodes = self._run(self._planner, None, _to_send, self._setup, work)
        return work

    def _plan(self, scheduler_output: Any, work: StepMetadata) -> None:
        super()._plan(scheduler_output, work)
        if isinstance(work, NodesMetadata) and self._setup is not None:
            shared = self._run(self._planner, False, _share_out, self._setup, work)
            if not shared:
                self._run(self._planner, None, Planner.revoke, work)

    def get_kv_connector_stats(self) -> Stats | None:
        """As the base class. A step has ended."""
        self._run(self._planner, None, _step_ended)
        return super().get_kv_connector_stats()

    def update_connector_output(self, connector_output: Any) -> None:
        """Pass the workers' reports to the planner, and what agents returned to its client."""
        report = connector_output.kv_connector_worker_meta
        if report is not None and report.daemons:
            self._run(self._planner, None, _reported, report.daemons)
        super().update_connector_output(connector_output)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Begin the loads of this rank's node."""
        failing = [Load(one.request, in_step=one.in_step) for one in connector_metadata.loads]
        nothing = replace(connector_metadata, loads=failing, stores=[], nodes=None)
        if (nodes := connector_metadata.nodes) is not None:  # vLLM's trees each have another name
            rest.workers.setdefault(nodes.instance, weakref.WeakMethod(self._await_copies))
        super().bind_connector_metadata(
            self._run(self._node_rank, nothing, NodeRank.own_part, connector_metadata)
        )

    def build_connector_worker_meta(self) -> StepReport | None:
        """The worker's report, with what the scheduler is to know of its daemon."""
        report = super().build_connector_worker_meta()
        rank = self._node_rank
        if rank is not None and (news := self._run(rank, None, NodeRank.news)) is not None:
            report = report or StepReport()
            report.daemons = {rank.rank: news}
        return report

    def shutdown(self) -> None:
        """End the agent's connection, and the rest as the base class."""
        self._run(self._node_rank, None, NodeRank.close)
        super().shutdown()


def _client(planner: Planner) -> NodesClient:
    assert isinstance(planner.client, NodesClient)
    return planner.client


def _share_out(planner: Planner, setup: EngineSetup, work: NodesMetadata) -> bool:
    share_out(_client(planner), setup, work)
    return True


def _to_send(planner: Planner, setup: EngineSetup, work: NodesMetadata) -> NodesWork | None:
    return to_send(_client(planner), setup, work)


def _step_ended(planner: Planner) -> None:
    _client(planner).step_ended()


def _reported(planner: Planner, news: dict[int, RankNews]) -> None:
    _client(planner).reported(news)
