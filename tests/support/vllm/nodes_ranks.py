"""``StubModelEngine`` whose ranks reach several daemons (``engine/nodes.py``)."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvass.client.parallel import ParallelStrategy
from kvass.testing.daemon import Daemon
from tests.support.vllm.ranks import StubModelEngine, until


class NodesEngine(StubModelEngine):
    """Rank ``r`` reaches ``daemons[where[r]]``, the scheduler the first one. All that travels
    between scheduler and ranks is copied, as between processes. As there, each machine has another
    name of the engine. ``tags``: of ranks that have another one."""

    def __init__(
        self,
        daemons: Sequence[Daemon],
        where: Sequence[int],
        strategy: ParallelStrategy,
        *,
        tags: Mapping[int, str] | None = None,
        more: Mapping[str, object] | None = None,
        **options: Any,
    ) -> None:
        self.daemons, self.where = daemons, where
        self._tags = tags or {}
        more = {"kvass.several_machines": True, **(more or {})}
        super().__init__(daemons[0].socket, strategy=strategy, more=more, **options)
        self.loses = 0
        """How many of the next reports with an agent's answers are lost."""
        run = self.ranks.run

        def run_and_report(work: Any, forward: bool = True) -> dict[str, Any]:
            told = run(work, forward)
            report = self.ranks.report
            agents = [] if report is None else [one.agent for one in report.daemons.values()]
            if self.loses and any(agent and agent.answers for agent in agents):
                self.loses -= 1
            elif report is not None:
                connector = self.world.connector
                connector._run(connector._planner, None, reported, sent(report))
            return told

        self.ranks.run = run_and_report  # type: ignore[method-assign]

    def _node_of(self, rank: int, name: str) -> tuple[Mapping[str, object], str]:
        node = self.where[rank]
        more: dict[str, object] = {"kvass.socket": self.daemons[node].socket}
        if rank in self._tags:
            more["kvass.tag"] = self._tags[rank]
        return more, f"{name}-{node}" if node else name

    def run_ranks(self, output: Any, work: Any) -> Any:
        return super().run_ranks(output, sent(work))

    def wait_connected(self) -> None:
        """Step until all nodes are found and answer."""
        until(lambda: self.step() and self.client.answering and self._all_there(), "all nodes")

    def _all_there(self) -> bool:
        """Whether no rank is missing at any daemon."""
        return all(not one["missing_ranks"] for one in self._instances())

    def _instances(self) -> list[Any]:
        return [one for daemon in self.daemons for one in daemon.status()["engines"]]

    def generate(self, name: str, tokens: Iterable[int], max_tokens: int = 2) -> Any:
        request = super().generate(name, tokens, max_tokens)
        for daemon in self.daemons:
            daemon.wait_until(reservations=0)
        return request


def reported(planner: Any, report: Any) -> None:
    """What ``NodesConnector.update_connector_output`` does with what agents returned."""
    planner.client.reported(report.daemons)


def sent(value: Any) -> Any:
    """What arrives of ``value``, which travels between processes."""
    return copy.deepcopy(value)
