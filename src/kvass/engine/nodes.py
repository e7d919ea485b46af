"""An engine whose ranks may reach several daemons: what a step brings to the ranks of each node,
and what they do with it (``client/nodes.py`` is the scheduler's client of such an engine).

Laws of this file:

- A rank gets the leases, reservations and slots of its own node, with the times of its daemon.
- A rank registers as a part of its node once the scheduler says which ranks that are.
- The first rank of each other node is its agent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec

from kvass.client.nodes import NodesClient, Part, RankNews, place
from kvass.client.parallel import ParallelStrategy
from kvass.client.steps import Relay, Settling, ToAgent
from kvass.client.worker import WorkerClient
from kvass.engine.boundary import Boundary
from kvass.engine.copier import Copier
from kvass.engine.hit_limits import HitLimits
from kvass.engine.setup import EngineSetup
from kvass.engine.step_work import Load, StepWork, Store
from kvass.messages import Register, Release
from kvass.types import Slots

ANSWER_S: Final = 0.002
"""How long an agent waits for an answer in a step that computes nothing. Such a step takes about as
long itself, and without the answer another one follows."""


@dataclass
class NodeWork:
    """What a step brings to the ``ranks`` of a node. ``agent``: for the first of them; None on the
    scheduler's own node. ``settled``: all of them give it back."""

    ranks: tuple[int, ...]
    agent: ToAgent | None = None
    settled: list[Settling] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)


@dataclass
class NodesWork:
    """A step's work by node, the scheduler's own first. ``form``: how often nodes were made.
    ``instance``: under which name they register."""

    form: int
    instance: str
    nodes: tuple[NodeWork, ...]


@dataclass
class SharedWork(StepWork):
    """The work of a step of an engine with several daemons. ``nodes``: None while they are not
    known."""

    nodes: NodesWork | None = None


# ---------------------------------------------------------------- in the scheduler


def nodes_client(setup: EngineSetup) -> NodesClient:
    """The client of an engine's scheduler whose ranks may reach several daemons."""

    def registered(ranks: Iterable[int]) -> tuple[Register, tuple[int, ...]]:
        strategy = setup.strategy.on(ranks)
        return setup.register(strategy), strategy.readers

    client = NodesClient(
        setup.socket,
        setup.register(),
        ranks=setup.strategy.ranks,
        registered=registered,
        cuts=setup.hits_whole_prompts,
        tokens=HitLimits(setup).tokens,
        spare=setup.spare,
        daemon_uid=setup.daemon_uid,
    )
    setup.when_named(client.complete)
    return client


def share_out(client: NodesClient, setup: EngineSetup, work: StepWork) -> NodesWork | None:
    """What ``work``, which was handed over, is for each node. None: the nodes are not known."""
    if not client.nodes:
        return None
    nodes = [NodeWork(ranks) for ranks in client.nodes]
    for node, other in zip(nodes[1:], client.others, strict=True):
        node.agent, node.settled = other.outgoing()
    if not client.others:
        nodes[0].loads, nodes[0].stores = work.loads, work.stores
    else:
        for load in work.loads:
            _share_load(client, nodes, load)
        for store in work.stores:
            parts = client.lent_to_write(store.reservation)
            for node, part in zip(nodes, parts, strict=False):
                if part is not None:
                    node.stores.append(_store_of(setup, store, part))
    return NodesWork(client.form, setup.instance, tuple(nodes))


def _share_load(client: NodesClient, nodes: list[NodeWork], load: Load) -> None:
    """Give each node its part of a load, or one that fails."""
    parts = client.lent_to_read(load.lease) if load.lease else ()
    for number, node in enumerate(nodes):
        rows = list(map(len, load.slots))
        found = _load_of(load, parts[number], rows) if parts else None
        if found is None:
            found = Load(load.request, in_step=load.in_step)
            if parts:
                node.settled.append(Release(boot=parts[number].boot, lease=parts[number].number))
        node.loads.append(found)


def _load_of(load: Load, part: Part, rows: list[int]) -> Load | None:
    """The load of one node. None: it has other rows than the engine wants."""
    slots = tuple(each.first(many) for each, many in zip(part.slots, rows, strict=False))
    if list(map(len, slots)) != rows:
        return None
    return replace(
        load,
        boot=part.boot,
        lease=part.number,
        given_s=part.given_s,
        deadline_s=part.deadline_s,
        slots=slots,
    )


def _store_of(setup: EngineSetup, store: Store, part: Part) -> Store:
    """The store of one node: those of the rows that it lacks."""
    blocks, slots = list(store.blocks), [Slots()] * len(store.blocks)
    for group, each in enumerate(setup.spans.row_blocks()):
        if (where := place(store.slots[group])) is not None:
            rows, ids = part.rows[where], store.blocks[group]
            blocks[group] = tuple(i for row in rows for i in ids[row * each : (row + 1) * each])
            slots[group] = part.slots[where]
    return replace(
        store,
        boot=part.boot,
        reservation=part.number,
        given_s=part.given_s,
        deadline_s=part.deadline_s,
        slots=tuple(slots),
        blocks=tuple(blocks),
    )


# ---------------------------------------------------------------- in a rank


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
        self._reached = b""
        """The boot that was reported last."""
        self._refusal = ""
        """The refusal that was reported last."""
        self._waits = False
        """Whether the step computes nothing."""

    @property
    def rank(self) -> int:
        """This rank of the engine."""
        return self._copier.strategy.rank

    def own_part(self, work: SharedWork) -> SharedWork:
        """What of ``work`` is for this rank's node."""
        self._waits = not work.computes
        if (shared := work.nodes) is None:
            return work
        mine = next(node for node in shared.nodes if self.rank in node.ranks)
        self._boundary.run(None, self._follow, shared, mine)
        return replace(work, loads=mine.loads, stores=mine.stores, nodes=None)

    def _follow(self, shared: NodesWork, mine: NodeWork) -> None:
        """Take part in this rank's node: register so, give back, send what is for the daemon."""
        client = self._copier.client
        if client is not None and (shared.form, client) != (self._form, self._moved):
            if shared.form != self._form:
                self.close()
            self._form, self._moved = shared.form, client
            self._copier.strategy = self._copier.strategy.on(mine.ranks)
            _register(client, self._copier.strategy, shared.instance)
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
        """What the scheduler is to know of this rank's daemon since the last call; None:
        nothing."""
        client = self._copier.client
        connection = None if client is None else client.connection
        boot = b"" if connection is None else connection.boot
        boot = b"" if boot == self._reached else boot
        self._reached = boot or self._reached
        refusal = "" if client is None else client.refusal
        before, self._refusal = self._refusal, refusal
        agent = None
        if self._relay is not None:
            agent = self._relay.take(ANSWER_S if self._waits else 0.0)
        news = RankNews(boot, self._form, agent, None if refusal == before else refusal)
        return news if news != RankNews(form=self._form) else None

    def close(self) -> None:
        """End the agent's connection."""
        if self._relay is not None:
            self._relay.close()
            self._relay = None


def _register(client: WorkerClient, strategy: ParallelStrategy, instance: str) -> None:
    """Register as a part of a node, unless that is how it is."""
    before = client.registration
    assert before is not None
    identity = {name: text for name, text in before.identity.items() if name != "node"}
    terms = strategy.register(
        instance, identity, before.chunk_tokens, before.layout, model=before.model
    )
    terms.counted, terms.cache_bytes = before.counted, before.cache_bytes
    if terms != msgspec.structs.replace(before, seq=0):
        client.register_as(terms)
