"""What the nodes of an engine lend it: the answers of all as one, and each node's part of it.

Laws of this file:

- What several nodes lent is under one number, with the times of the earliest end.
- A reserve is granted by all nodes or given back by all. Each node stores the rows that it lacks,
  because a node whose daemon was restarted, or is smaller, lacks more than others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from kvass.client.connection import DaemonConnection
from kvass.client.lookups import PENDING, Match, Pending
from kvass.client.scheduler import SEND_APART, Reserving, SchedulerClient, SendApart
from kvass.client.steps import RelayedGrant, RelayedMatch
from kvass.messages import Grant, Granted
from kvass.types import Slots


@dataclass(frozen=True)
class NodePart:
    """What one node lent: ``number`` is its lease or reservation, with the times that its daemon
    said. ``rows``: of each group that is stored, which of the rows of all nodes it has."""

    boot: bytes
    number: int
    given_s: float
    deadline_s: float
    slots: tuple[Slots, ...]
    rows: tuple[tuple[int, ...], ...] = ()


@dataclass(slots=True)
class ReservingAll(Reserving):
    """A reserve on all nodes. ``clients``, ``parts``: by node, the own one first. ``form``: how
    often nodes had been made. ``answers``: theirs, and the connections on which they came. The
    clients are used as such of the base class."""

    clients: tuple[SchedulerClient, ...] = ()
    parts: tuple[Reserving, ...] = ()
    form: int = 0
    answers: dict[int, tuple[Granted | SendApart | None, DaemonConnection | None]] = field(
        default_factory=dict
    )

    def granted(self) -> list[Granted] | SendApart | Pending | None:
        """What all nodes granted; else as ``SchedulerClient.granted``."""
        for number, (client, part) in enumerate(zip(self.clients, self.parts, strict=True)):
            if number not in self.answers:
                came_on, answer = client.connection, SchedulerClient.granted(client, part)
                if not isinstance(answer, Pending):
                    self.answers[number] = answer, came_on
        if len(self.answers) < len(self.parts):
            return PENDING
        grants = [self._valid(number) for number in range(len(self.parts))]
        granted = [one for one in grants if one is not None]
        if len(granted) == len(grants):
            return granted
        self._abort_all()
        apart = any(isinstance(answer, SendApart) for answer, _ in self.answers.values())
        return SEND_APART if apart else None

    def give_up(self) -> None:
        """Give back what some nodes granted, and what the others grant later."""
        self._abort_all()
        for number, (client, part) in enumerate(zip(self.clients, self.parts, strict=True)):
            if number not in self.answers:
                SchedulerClient.give_up(client, part)

    def _valid(self, number: int) -> Granted | None:
        """The grant of a node, if it came on the connection that the node has."""
        answer, came_on = self.answers.get(number, (None, None))
        valid = isinstance(answer, Granted) and came_on is self.clients[number].connection
        return answer if valid and isinstance(answer, Granted) else None

    def _abort_all(self) -> None:
        for number, client in enumerate(self.clients):
            if (granted := self._valid(number)) is not None:
                for grant in granted.grants:
                    if grant.reservation:
                        SchedulerClient.abort(client, granted.boot, grant.reservation)


class Lent:
    """What all nodes lent and the ranks do not have yet, by the number that stands for it."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self.matches: dict[int, tuple[Match, ...]] = {}
        """By the lease of the own node."""
        self.grants: dict[int, tuple[NodePart | None, ...]] = {}

    def clear(self) -> None:
        """Nothing of it counts any more."""
        self.matches.clear()
        self.grants.clear()

    def grant(self, granted: Sequence[Granted], boot: bytes) -> Granted:
        """What all nodes granted, as one answer: for each item the rows that any of them granted,
        under one number. ``boot``: what stands for the boots of all."""
        items = zip(*(one.grants for one in granted), strict=True)
        return Granted(
            boot=boot,
            given_s=granted[0].given_s,
            deadline_s=min(one.deadline_s for one in granted),
            grants=[self._one(granted, grants) for grants in items],
        )

    def _one(self, granted: Sequence[Granted], grants: Sequence[Grant]) -> Grant:
        """The grants of all nodes for one item, as one."""
        together = Grant(
            later=min((grant.later for grant in grants if grant.later >= 0), default=-1),
            refused=tuple(sorted({c for grant in grants for c in grant.refused or ()})),
            kept=min(grant.kept for grant in grants),
            error=next((grant.error for grant in grants if grant.error), ""),
        )
        if not (lent := [grant.rows() for grant in grants if grant.reservation]):
            return together
        union = [sorted(set().union(*chunks)) for chunks in zip(*lent, strict=True)]
        together.which = tuple(map(tuple, union))
        together.chunks = tuple(sorted(set().union(*union)))
        together.slots = tuple(Slots(extents=((place,),)) for place in range(len(union)))
        together.reservation = next(self._numbers)
        self.grants[together.reservation] = tuple(
            _part(one, grant, together.which) if grant.reservation else None
            for one, grant in zip(granted, grants, strict=True)
        )
        return together

    def own(self, leases: Iterable[int], reservations: Iterable[int]) -> list[int] | None:
        """What the own node granted of ``reservations``. None: some of it, or of ``leases``, is not
        lent any more."""
        if not self.matches.keys() >= set(leases) or not self.grants.keys() >= set(reservations):
            return None
        parts = [self.grants[number][0] for number in reservations]
        return [part.number for part in parts if part is not None]

    def to_read(self, lease: int) -> tuple[NodePart, ...]:
        """What each node lent of a match that was taken; empty: nothing."""
        matches = self.matches.get(lease, ())
        return tuple(_lent(match, match.lease, match.slots) for match in matches)

    def to_write(self, reservation: int) -> tuple[NodePart | None, ...]:
        """What each node lent of a grant; empty: nothing."""
        return self.grants.get(reservation, ())

    def forget(self, leases: Iterable[int], reservations: Iterable[int]) -> None:
        """The ranks have these from now on."""
        for lease in leases:
            self.matches.pop(lease, None)
        for reservation in reservations:
            self.grants.pop(reservation, None)


def together(matches: Sequence[Match], boot: bytes, *, cuts: bool) -> Match:
    """What all of ``matches`` have, the own node's first. ``cuts``: it is cut to that; else all
    have it. ``boot``: as in ``Lent.grant``."""
    own, (chunks, blocks) = matches[0], min((one.chunks, one.blocks) for one in matches)
    rows = chunks - own.first + (blocks > 0)
    return msgspec.structs.replace(
        own,
        boot=boot,
        chunks=chunks,
        blocks=blocks,
        deadline_s=min(one.deadline_s for one in matches),
        slots=tuple(each.first(rows) for each in own.slots) if cuts else own.slots,
    )


def place(slots: Slots) -> int | None:
    """Which of ``NodePart.slots`` stand for ``slots`` of a grant of all nodes; None: the group is
    not stored."""
    return slots.extents[0][0] if slots.extents else None


def _lent(lent: Match | Granted, number: int, slots: tuple[Slots, ...]) -> NodePart:
    """What the node of ``lent`` lent, in the time of its daemon."""
    shift_s = lent.shift_s if isinstance(lent, RelayedMatch | RelayedGrant) else 0.0
    return NodePart(lent.boot, number, lent.given_s + shift_s, lent.deadline_s + shift_s, slots)


def _part(granted: Granted, grant: Grant, which: Sequence[Sequence[int]]) -> NodePart:
    """What a node lent of the rows ``which``."""
    places = zip(which, grant.rows(), strict=True)
    rows = tuple(tuple(map(chunks.index, own)) for chunks, own in places)
    return replace(_lent(granted, grant.reservation, grant.slots), rows=rows)
