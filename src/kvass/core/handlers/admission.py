"""Registration: a connection becomes an (instance, rank); a complete instance gets a namespace.

A refused ``Register`` changes nothing. When an instance moves to another generation, no row that it
is writing becomes READY.
"""

from __future__ import annotations

from itertools import islice
from typing import Final

import msgspec

from kvass.core.clients.layouts import ranks_of
from kvass.core.clients.registry import (
    ClientConnection,
    Instance,
    check_agrees,
    check_register,
    differences,
    distance,
    layout_digest,
    model_of,
    namespace_digest,
    row_class_specs,
    worker_of,
)
from kvass.core.clients.traffic import Traffic
from kvass.core.handlers import former
from kvass.core.pending.settlement import MOVED
from kvass.core.rows.row_classes import Namespace
from kvass.core.rows.row_table import NEVER
from kvass.core.state import State
from kvass.core.tiers import epochs, promote
from kvass.errors import Refused
from kvass.messages import Register, Registered
from kvass.types import MAX_GROUPS, SCHEDULER, RankLayout

_COMPARED: Final = 16
"""With how many older namespaces of its model a new namespace is compared."""
GROUPS: Final = 2
"""The most layer groups per namespace, on average over ``Limits.namespaces`` namespaces. More would
make a status too slow: it is one step, and each group takes 1 or 2 us of it."""


def register(state: State, connection: ClientConnection, msg: Register) -> Registered:
    """Make a connection the scheduler or a rank of its instance.

    If it registers again with the same values, only the reply is sent again. If it registers again
    with another generation, its instance moves to that generation. ``uncached`` may change, too.
    """
    terms = msgspec.structs.replace(msg, seq=0, layout=None)
    before = connection.registered
    if before is None:
        _admit(state, connection, terms, msg.layout)
    elif (
        msgspec.structs.replace(before, generation=terms.generation, uncached=terms.uncached)
        != terms
        or layout_digest(msg.layout) != connection.layout
    ):
        raise Refused("already_registered", "this session is another (instance, rank) already")
    elif before != terms:
        _admit(state, connection, terms, None)
    instance = state.instances[msg.instance]
    ns = state.namespace_of(instance)
    return Registered(namespace=b"" if ns is None else ns.digest, missing=instance.missing)


def _admit(
    state: State, connection: ClientConnection, terms: Register, layout: RankLayout | None
) -> None:
    """Check the terms, and make the connection the instance's scheduler or rank.

    ``layout``: the layout of the ``Register``. ``terms``: the rest of it.
    """
    check_register(terms, layout, state.config.limits)
    state.connection_limits.check(connection)
    instance = state.instances.get(terms.instance) or Instance(
        id=terms.instance, terms=terms, since_s=state.now
    )
    if instance.connections.get(terms.rank, connection.id) != connection.id:
        who = "its scheduler" if terms.rank == SCHEDULER else f"rank {terms.rank}"
        raise Refused("rank_taken", f"{who} of instance {terms.instance!r} is alive already")
    digest = layout_digest(layout)
    worker = None if layout is None else worker_of(terms, layout, digest)
    check_agrees(terms, worker, instance)
    # All ranks share one dict of the identity's fields, to save memory.
    terms = msgspec.structs.replace(terms, identity=instance.terms.identity)
    workers = dict(instance.workers)
    if worker is not None:
        workers[terms.rank] = worker
    generation = terms.generation if terms.rank == SCHEDULER else instance.generation
    complete = msgspec.structs.replace(instance, workers=workers, generation=generation)
    moves = generation != instance.generation
    namespace = instance.namespace
    former.note(state, connection, terms)
    if not complete.missing and (instance.missing or moves):
        namespace = _namespace_for(state, complete)
    state.connection_limits.take_place(connection)
    if layout is not None:
        state.layouts.remember(msgspec.msgpack.encode(layout))
    if moves:
        _leave(state, instance)
    instance.workers, instance.generation, instance.namespace = workers, generation, namespace
    instance.home = instance.home if namespace is None else namespace
    instance.connections[terms.rank] = connection.id
    connection.registered, connection.layout = terms, digest
    state.refusals.pop(instance.id, None)
    instance.seen_s = state.now
    state.instances[instance.id] = instance


def _leave(state: State, instance: Instance) -> None:
    """End the instance's use of its namespace. A private namespace without users is cleared."""
    state.settlement.lost(instance.id, MOVED)
    ns, instance.namespace = state.namespace_of(instance), None
    users = {i.namespace for i in state.instances.values()}
    if ns is not None and ns.private and ns.id not in users:
        state.classes.clear([ns])


def _namespace_for(state: State, instance: Instance) -> int:
    """The id of the namespace of an instance whose ranks are all registered. The namespace is
    created if it is new."""
    if not instance.covers_all_shards(instance.writers):
        written = {instance.workers[rank].shard for rank in instance.writers}
        lacking = sorted(set(range(instance.terms.world_size)) - written)
        raise Refused("contradiction", f"writer: no rank writes shards {lacking}")
    specs = row_class_specs(instance)
    chunk = sum(s.row_bytes for s in specs)
    if chunk > state.quota:
        text = f"a chunk takes {chunk} bytes and an instance may write {state.quota} at a time: "
        share = state.config.limits.instance_write_share
        raise Refused("too_large", text + f"give the daemon an L1 above {int(chunk / share)} bytes")
    digest = namespace_digest(instance)
    if (known := state.namespaces.by_digest.get(digest)) is not None:
        known.ranks = ranks_of(instance)
        return known.id
    _make_place(state, len(specs))
    terms = msgspec.structs.replace(instance.terms, generation=instance.generation)
    model = model_of(instance.terms)
    same = islice(
        (ns for ns in reversed(state.namespaces.values()) if ns.model == model), _COMPARED
    )
    compared = [(differences(ns.terms, terms), ns.digest) for ns in same]
    differs_in, like = min(compared, key=lambda one: distance(one[0]), default=((), b""))
    number, epoch = state.namespaces.new_id(digest)
    made = Namespace(
        id=number,
        digest=digest,
        classes=[state.classes.add(spec, number) for spec in specs],
        chunk_tokens=instance.terms.chunk_tokens,
        private=bool(instance.generation),
        terms=terms,
        ranks=ranks_of(instance),
        model=model,
        like=like,
        differs_in=differs_in,
        epoch=epoch,
        traffic=Traffic(from_tiers=[0] * len(state.tiers.all)),
    )
    state.namespaces.add(made)
    state.followers.saving.put(made.saved)
    epochs.namespace_added(state, made)
    return number


def _make_place(state: State, groups: int) -> None:
    """Make sure that a namespace of ``groups`` layer groups may be added.

    It drops some namespaces without rows. If a limit would be exceeded, it drops those that were
    used longest ago. A namespace of a live instance is never dropped.

    Raises:
        Refused: ``limit``, if the limit would still be exceeded.
    """
    live = {i.namespace for i in state.instances.values()}
    idle = [ns for ns in state.namespaces.values() if ns.id not in live]
    empty = (ns for ns in idle if not any(c.in_use for c in ns.classes))
    _drop(state, [*islice(empty, state.config.slice_ends)])
    limit, there = state.config.limits.namespaces, state.namespaces.values()
    places = limit - 1 - len(there)
    groups_left = max(MAX_GROUPS, GROUPS * limit) - groups - sum(len(ns.classes) for ns in there)
    gone, may_go = list[Namespace](), None
    while places < 0 or groups_left < 0:
        may_go = _latest_first(state, idle) if may_go is None else may_go
        if not may_go:
            raise Refused("limit", f"at most {limit} namespaces of {GROUPS} groups on average")
        gone.append(may_go.pop())
        places, groups_left = places + 1, groups_left + len(gone[-1].classes)
    _drop(state, gone)


def _latest_first(state: State, idle: list[Namespace]) -> list[Namespace]:
    """The namespaces of ``idle`` that nobody reads or writes, the most recently used first."""
    uses = state.classes.sets.last_uses()
    last = {
        ns.id: max(uses.get(t.id, NEVER) for c in ns.classes for t in c.of_tenants.values())
        for ns in idle
    }
    may_go = [
        ns for ns in idle if ns.id in state.namespaces and last[ns.id] < state.rows.table.clock
    ]
    return sorted(may_go, key=lambda ns: -last[ns.id])


def _drop(state: State, gone: list[Namespace]) -> None:
    before = [ns.epoch for ns in gone]
    for ns in gone:
        ns.epoch += 1
    promote.cancel(state, gone)  # a tier may not have said yet what it holds
    for ns, epoch in zip(gone, before, strict=True):
        state.namespaces.remove(ns, epoch)
    state.followers.saving.remove("namespace", (ns.id for ns in gone))
    classes = [c for ns in gone for c in ns.classes]
    state.classes.remove([ns.id for ns in gone], classes, "forgotten")
    state.reclaim()
