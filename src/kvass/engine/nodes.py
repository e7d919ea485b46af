"""An engine whose ranks may reach several daemons: what a step brings to the ranks of each node.
``client/nodes.py`` is the scheduler's client of such an engine, ``node_rank.py`` what a rank does.

Law of this file: a rank gets the leases, reservations and slots of its own node, with the times of
its daemon.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from kvass.client.node_parts import NodePart, place
from kvass.client.nodes import NodesClient
from kvass.client.steps import Settling, ToAgent
from kvass.engine.hit_limits import HitLimits
from kvass.engine.setup import EngineSetup
from kvass.engine.step_work import Load, StepWork, Store
from kvass.messages import Register, Release
from kvass.types import Slots


@dataclass
class NodeWork:
    """What a step brings to the ``ranks`` of a node. ``agent``: for the first of them; None on the
    scheduler's own node. ``settled``: all of them give it back. ``known``: ``Reached.known`` of
    each."""

    ranks: tuple[int, ...]
    agent: ToAgent | None = None
    settled: list[Settling] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    known: list[tuple[bytes, str]] = field(default_factory=list)


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


def nodes_client(setup: EngineSetup) -> NodesClient:
    """The client of an engine's scheduler whose ranks may reach several daemons."""

    def registered(ranks: Iterable[int], daemons: int) -> tuple[Register, tuple[int, ...]]:
        strategy = setup.strategy.on(ranks, daemons)
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


def share_out(client: NodesClient, setup: EngineSetup, work: SharedWork) -> None:
    """Note in ``work``, which is not handed over yet, what of it is for each node. If this raises,
    nothing of it may be handed over."""
    work.nodes = None
    if not client.others:
        return
    nodes = [NodeWork(ranks) for ranks in client.nodes]
    for load in work.loads:
        _share_load(client, nodes, load, cuts=setup.hits_whole_prompts)
    for store in work.stores:
        parts = client.lent.to_write(store.reservation)
        for node, part in zip(nodes, parts, strict=False):
            if part is not None:
                node.stores.append(_store_of(setup, store, part))
    work.nodes = NodesWork(client.form, setup.instance, tuple(nodes))


def to_send(client: NodesClient, setup: EngineSetup, work: SharedWork) -> NodesWork | None:
    """``work.nodes`` as the step brings it. Call it after the hand-over. None: the nodes are not
    known. If nothing was handed over, or nodes were made anew since, their loads fail."""
    shared, alone = work.nodes, not client.others
    if not client.nodes:
        return None
    if shared is None or shared.form != client.form or not (work.leased() or work.stores):
        failing = [Load(load.request, in_step=load.in_step) for load in work.loads]
        loads, stores = (work.loads, work.stores) if alone else (failing, [])
        nodes = [NodeWork(ranks, loads=loads, stores=stores) for ranks in client.nodes]
        shared = NodesWork(client.form, setup.instance, tuple(nodes))
    for node in shared.nodes:
        node.known = list(map(client.reached.known, node.ranks))
    for node, (agent, settled) in zip(shared.nodes[1:], client.outgoing(), strict=True):
        node.agent, node.settled = agent, [*settled, *node.settled]
    return shared


def _share_load(client: NodesClient, nodes: list[NodeWork], load: Load, *, cuts: bool) -> None:
    """Give each node its part of a load, or one that fails. ``cuts``: as in ``_load_of``."""
    parts = client.lent.to_read(load.lease) if load.lease else ()
    for number, node in enumerate(nodes):
        rows = list(map(len, load.slots))
        found = _load_of(load, parts[number], rows, cuts) if parts else None
        if found is None:
            found = Load(load.request, in_step=load.in_step)
            if parts:
                node.settled.append(Release(boot=parts[number].boot, lease=parts[number].number))
        node.loads.append(found)


def _load_of(load: Load, part: NodePart, rows: list[int], cuts: bool) -> Load | None:
    """The load of one node. None: it has other rows than the engine wants. ``cuts``: of more rows
    the first ones are those that it wants; else they may be others."""
    slots = part.slots
    if cuts:
        slots = tuple(each.first(many) for each, many in zip(slots, rows, strict=False))
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


def _store_of(setup: EngineSetup, store: Store, part: NodePart) -> Store:
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
