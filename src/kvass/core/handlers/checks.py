"""Checks of the values in a message, before anything changes.

They raise ``Refused``, whose text says what to do. They change nothing, with one exception: a lease
or reservation that a message names is ended first if a lost connection owed it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvass.core.clients.registry import ClientConnection, Instance
from kvass.core.pending.ledger import E, Lease, Ledger, Reservation
from kvass.core.rows.index import key_array
from kvass.errors import ErrorCode, Refused
from kvass.types import MAX_RANKS, SCHEDULER, Limits, U64Array

if TYPE_CHECKING:
    from kvass.core.rows.row_classes import Namespace
    from kvass.core.state import State


def own_rank(connection: ClientConnection, rank: int) -> int:
    """``rank``, if it is the connection's own rank (law 2)."""
    if connection.registered is None:
        raise Refused("not_registered", "send Register first")
    own = connection.registered.rank
    if rank != own:
        mine = "the scheduler" if own == SCHEDULER else f"rank {own}"
        raise Refused("bad_rank", f"this session is {mine}, not rank {rank}")
    return rank


def instance_of(state: State, connection: ClientConnection) -> Instance:
    if connection.registered is None:
        raise Refused("not_registered", "send Register first")
    return state.instances[connection.registered.instance]


def scheduler_of(state: State, connection: ClientConnection) -> Instance:
    """The connection's instance, if the connection is its scheduler."""
    own_rank(connection, SCHEDULER)
    return instance_of(state, connection)


def known_ranks(field: str, ranks: tuple[int, ...], instance: Instance) -> set[int]:
    """``ranks`` as a set: 1..MAX_RANKS of them, all inside the instance's world (law 2)."""
    if not 1 <= len(ranks) <= MAX_RANKS:
        raise Refused("bad_rank", f"{field}: name 1..{MAX_RANKS} ranks, not {len(ranks)}")
    for rank in ranks:
        if not 0 <= rank < instance.terms.ranks:
            world = f"the world of {instance.terms.ranks}"
            raise Refused("bad_rank", f"{field}: rank {rank} is outside {world}")
    named = set(ranks)
    if len(named) < len(ranks):
        raise Refused("bad_rank", f"{field}: name each rank once")
    return named


def is_request(request: str, limits: Limits) -> bool:
    """Whether a request's id is not empty (law 2) and not too long (law 12)."""
    return 0 < len(request) <= limits.request_id_bytes


def check_request(request: str, limits: Limits) -> None:
    """Raise ``Refused`` unless ``is_request``."""
    if not is_request(request, limits):
        most = limits.request_id_bytes
        raise Refused("bad_value", f"request: give a non-empty id of at most {most} characters")


def split_keys(digests: bytes, width: int, first: int, limits: Limits) -> U64Array:
    """The digests of a message as an array of keys. ``first`` must be at most their number."""
    if not 8 <= width <= 32 or len(digests) % width:
        text = f"digests: {len(digests)} bytes are no multiple of width {width} in 8..32"
        raise Refused("bad_value", text)
    count = len(digests) // width
    if count > limits.keys_per_message:
        raise Refused("limit", f"at most {limits.keys_per_message} keys a message")
    if not 0 <= first <= count:
        raise Refused("bad_value", f"first: {first} is not in 0..{count}")
    return key_array(digests, width)


def most_keys(state: State, ns: Namespace) -> int:
    """The most keys of a prompt that one step looks up.

    Each key is looked up in every layer group, so with more keys a step would take too long.
    """
    return state.config.limits.keys_per_message // len(ns.classes)


def check_boot(state: State, boot: bytes) -> None:
    """Refuse a message that names another run of the daemon."""
    if boot != state.config.boot:
        raise Refused("wrong_boot", "this names another run of the daemon: drop it")


def open_lease(state: State, connection: ClientConnection, boot: bytes, an_id: int) -> Lease | None:
    """The connection's lease of this boot, or ``None`` if it ended."""
    return _open(state, connection, boot, an_id, state.leases, "unknown_lease")


def open_reservation(
    state: State, connection: ClientConnection, boot: bytes, an_id: int
) -> Reservation | None:
    """The connection's reservation of this boot, or ``None`` if it ended."""
    return _open(state, connection, boot, an_id, state.reservations, "unknown_reservation")


def _open(
    state: State,
    connection: ClientConnection,
    boot: bytes,
    an_id: int,
    ledger: Ledger[E],
    unknown: ErrorCode,
) -> E | None:
    instance = instance_of(state, connection)
    check_boot(state, boot)
    if not state.settlement.issued(an_id):
        raise Refused(unknown, f"number {an_id} was never given")
    state.settlement.carry_out_losses_of(an_id)
    entry = ledger.all.get(an_id)
    if entry is not None and entry.instance != instance.id:
        raise Refused("not_yours", f"number {an_id} is another instance's")
    return entry


def named_namespace(state: State, digest: bytes) -> Namespace:
    """The namespace of that digest. Connections that have not registered name one by its digest."""
    if (found := state.namespaces.by_digest.get(digest)) is None:
        raise Refused("bad_value", "namespace: no such digest; see `kvass status`")
    return found
