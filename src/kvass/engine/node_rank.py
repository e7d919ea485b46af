"""A rank of an engine whose ranks may reach several daemons (``nodes.py``).

Laws of this file:

- A rank registers as a part of its node once the scheduler says which ranks that are.
- The first rank of each other node is its agent.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import msgspec

from kvass.client.parallel import ParallelStrategy, without_node
from kvass.client.reached import RankNews
from kvass.client.steps import Relay, ToAgent
from kvass.client.worker import WorkerClient
from kvass.engine.boundary import Boundary
from kvass.engine.copier import Copier
from kvass.engine.nodes import NodesWork, NodeWork, SharedWork
from kvass.messages import Release

ANSWER_S: Final = 0.002
"""How long an agent waits for an answer in a step that computes nothing. Such a step takes about as
long itself, and without the answer another one follows."""


class NodeRank:
    """A rank of an engine with several daemons. In each step call ``own_part`` first, and ``news``
    last."""

    def __init__(self, copier: Copier, boundary: Boundary) -> None:
        self._copier, self._boundary = copier, boundary
        self._form = 0
        self._moved: WorkerClient | None = None
        """The connection that registers as the nodes of ``_form`` need it."""
        self._relay: Relay | None = None
        """If this rank is an agent."""
        self._known = b"", ""
        """What the scheduler knows of this rank (``Reached.known``)."""
        self._waits = False
        """Whether the step computes nothing."""

    @property
    def rank(self) -> int:
        """This rank of the engine."""
        return self._copier.strategy.rank

    def own_part(self, work: SharedWork) -> SharedWork:
        """What of ``work`` is for this rank's node."""
        self._waits, self._known = not work.computes, (b"", "")
        if (shared := work.nodes) is None:
            return work
        mine = next(node for node in shared.nodes if self.rank in node.ranks)
        self._known = mine.known[mine.ranks.index(self.rank)]
        self._boundary.run(None, self._follow, shared, mine)
        return replace(work, loads=mine.loads, stores=mine.stores, nodes=None)

    def _follow(self, shared: NodesWork, mine: NodeWork) -> None:
        """Take part in this rank's node: register so, give back, send what is for the daemon."""
        client = self._copier.client
        if client is not None and (shared.form, client) != (self._form, self._moved):
            if shared.form != self._form:
                self.close()
            self._form, self._moved = shared.form, client
            self._copier.strategy = self._copier.strategy.on(mine.ranks, len(shared.nodes))
            _register(client, self._copier.strategy, shared)
        if client is not None:
            self._give_back(client, mine)
        if mine.agent is not None and mine.ranks[0] == self.rank:
            self._pass_on(mine.agent)

    def _give_back(self, client: WorkerClient, mine: NodeWork) -> None:
        for one in mine.settled:
            if isinstance(one, Release):
                client.release(one.boot, one.lease)
            elif self._copier.strategy.writes:
                client.abort(one.boot, one.reservation)

    def _pass_on(self, to: ToAgent) -> None:
        if self._relay is None and to.registration is not None:
            self._relay = Relay(*self._copier.daemon, to.registration)
            to.registration = None
        if self._relay is not None:
            self._relay.send(to)

    def news(self) -> RankNews | None:
        """What the scheduler is to know of this rank's daemon and does not; None: nothing."""
        client, (known, said) = self._copier.client, self._known
        connection = None if client is None else client.connection
        boot = b"" if connection is None or connection.boot == known else connection.boot
        failure = "" if client is None else client.why_absent
        agent = None
        if self._relay is not None:
            agent = self._relay.take(ANSWER_S if self._waits else 0.0)
        news = RankNews(boot, self._form, agent, None if failure == said else failure)
        return news if news != RankNews(form=self._form) else None

    def close(self) -> None:
        """End the agent's connection."""
        if self._relay is not None:
            self._relay.close()
            self._relay = None


def _register(client: WorkerClient, strategy: ParallelStrategy, shared: NodesWork) -> None:
    """Register as a part of a node. Where nodes are made anew, the end of the connection settles
    what is lent, so it ends even if nothing else changes."""
    before = client.registration
    assert before is not None
    identity = without_node(before.identity)
    terms = strategy.register(
        shared.instance, identity, before.chunk_tokens, before.layout, model=before.model
    )
    terms.counted, terms.cache_bytes = before.counted, before.cache_bytes
    if shared.form > 1 or terms != msgspec.structs.replace(before, seq=0):
        client.register_as(terms)
