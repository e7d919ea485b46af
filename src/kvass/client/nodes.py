"""The scheduler's client of an engine whose ranks may reach several daemons: that of its own node,
which asks the others', too (``steps.py``).

Laws of this file:

- A hit is what all nodes have. The own daemon is asked first, and a miss there is a miss. The
  others are asked for what it has, or, while it loads from tiers, for the same. If it then has
  less, who has not answered is asked anew. The shortest answer is the hit.
- Of a hit that needs all rows, longer answers are cut. Else they are given back, and asked for
  again as far as the shortest goes: ``ROUNDS`` times, then it is a miss.
- What several nodes lent (``node_parts.py``) is settled on all of them, or handed over on all.
- While some rank's daemon is not known, or has no connection, nothing matches and nothing is
  stored.
- While all ranks reach the daemon of the scheduler, the client does what its base class does.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Final

import msgspec

from kvass.client.connection import BOOT_BYTES
from kvass.client.lookups import CLIENTS, OTHER_NODE, PENDING, BlockHashes, Found, Match, Pending
from kvass.client.node_parts import Lent, ReservingAll, together
from kvass.client.parallel import NODE
from kvass.client.reached import RankNews, Reached
from kvass.client.reset import GENERATION_BYTES
from kvass.client.scheduler import Prefetching, Reserving, SchedulerClient, SendApart
from kvass.client.steps import Settling, StepClient, ToAgent
from kvass.messages import NO_CONTEXT, Granted, Register, RequestContext, ReserveItem

ROUNDS: Final = 2


@dataclass
class _Asked:
    """The lookup of one request from chunk ``first`` of ``digests`` on, on all nodes. ``chunks``:
    how many are asked for; None: all. ``cut``: because of which node. ``lack``: the nodes
    whose daemons said that they have nothing of it."""

    first: int
    digests: bytes
    chunks: int | None = None
    rounds: int = 0
    cut: str = ""
    lack: set[StepClient] = field(default_factory=set)


@dataclass(slots=True, frozen=True)
class _PrefetchingAll(Prefetching):
    """A prefetch of the own node, which the others do after it. ``asked``: for what. ``begun``:
    those of the others."""

    asked: tuple[bytes, int, int, RequestContext, float]
    begun: list[tuple[StepClient, Prefetching]] = field(default_factory=list)


class NodesClient(SchedulerClient):
    """``ranks``: how many the engine has. ``registered``: how the scheduler registers with the
    daemon that these ranks reach, one of so many, and which numbers they have there. ``cuts``: hits
    need all rows, so they can be cut. ``tokens``: how many tokens so many chunks and blocks have.
    Other arguments as those of ``SchedulerClient``."""

    def __init__(
        self,
        socket: str,
        registration: Register,
        *,
        ranks: int,
        registered: Callable[[Iterable[int], int], tuple[Register, tuple[int, ...]]],
        cuts: bool,
        tokens: Callable[[int, int], int],
        spare: int = 0,
        daemon_uid: int | None = None,
    ) -> None:
        super().__init__(socket, registration, spare=spare, incomplete=True, daemon_uid=daemon_uid)
        self._registered, self._cuts, self._spare = registered, cuts, spare
        self._tokens = tokens
        self.reached = Reached(ranks)
        self.nodes: tuple[tuple[int, ...], ...] = ()
        """The ranks of each node, the own one first; empty: not known yet."""
        self.form = 0
        """How often nodes were made."""
        self._others: tuple[StepClient, ...] = ()
        self._step = self._ended = 0
        """How many steps were begun, and how many of them have ended."""
        self._asked: dict[str, _Asked] = {}
        self.lent = Lent()
        self._said = self._uncached = ""
        """What the own daemon shows of nodes that are lost, and of this engine."""
        self._was_cleared = False
        """Whether some node has not confirmed a clear: nodes that are found later clear theirs."""

    # ------------------------------------------------------------ nodes

    @property
    def _clients(self) -> tuple[SchedulerClient, ...]:
        """The clients of all nodes. Call methods of the base class with them."""
        return (self, *self._others)

    @property
    def others(self) -> tuple[StepClient, ...]:
        """The clients of the other nodes."""
        return self._others

    @property
    def owes(self) -> bool:
        """Whether a step should bring something to another node."""
        return any(node.owes for node in self._others)

    def reported(self, news: Mapping[int, RankNews]) -> None:
        """Take in what ranks reported after a step."""
        self.reached.reported(news)
        for rank, one in news.items():
            if one.agent is not None and one.form == self.form:
                for node, ranks in zip(self._others, self.nodes[1:], strict=True):
                    if rank == ranks[0]:
                        node.arrived(one.agent)
        self._tell()

    def _tell(self) -> None:
        """Log which node has no daemon, or is refused, and have the own daemon show it."""
        lost = [node for node in self._others if node.connection is None and node.failure]
        all_ = [f"the daemon of {node.name}: {node.failure}" for node in lost]
        said = "; ".join(all_ + self.reached.complaints())
        if said != self._said:
            self._said = said
            if said:
                self.note("nodes_lost", f"runs uncached: {said}", again=True)
            super().tell_uncached(self._uncached or said)

    def _make_nodes(self) -> None:
        """Make the nodes, once it is known which ranks reach one daemon."""
        connection = self.connection
        nodes = () if connection is None else self.reached.nodes(connection.boot)
        if not nodes or (nodes == self.nodes and not any(node.astray for node in self._others)):
            return
        if nodes != self.nodes and not self.reached.certain:
            return
        there = [node for node in self._others if node.connection is not None]
        if super().resetting or any(node.resetting for node in there):  # its present client owes it
            return
        moves = len(nodes) > 1 or bool(self._others)
        self._void()
        self.nodes, self.form = nodes, self.form + 1
        self._others = tuple(map(self._client_of, nodes[1:]))
        if moves:
            self.move(*self._registered(nodes[0], len(nodes)))
            said = "; ".join(node.name for node in self._others) or "no other one"
            self._say(logging.INFO, f"other daemons of this engine: {said}")

    def _client_of(self, ranks: tuple[int, ...]) -> StepClient:
        """The client of the node of ``ranks``, which registers with our identity and state."""
        ours, (terms, readers) = self.registration, self._registered(ranks, len(self.nodes))
        assert ours is not None
        terms = msgspec.structs.replace(
            terms,
            identity={**ours.identity, **terms.identity},
            generation=ours.generation,
            uncached=self._uncached,
        )
        name = terms.identity[NODE].partition(":")[0]
        node = StepClient(name, terms, readers=readers, spare=self._spare)
        if self._was_cleared:
            node.clear(0.0)
        return node

    def _void(self) -> None:
        """Nothing that was lent counts any more: the ranks and we register anew."""
        self._asked.clear()
        self.lent.clear()
        for node in self._others:
            node.close()

    @property
    def _boot_of_all(self) -> bytes:
        """What stands for the boots of all daemons, and for these nodes: where nodes are made anew,
        stores are lost as with a daemon. Empty: one of them is not there."""
        connections = [self.connection, *(node.connection for node in self._others)]
        boots = [one.boot for one in connections if one is not None]
        if len(boots) < len(connections):
            return b""
        made = self.form.to_bytes(8, "little")
        return blake2b(b"".join((made, *boots)), digest_size=BOOT_BYTES).digest()

    @property
    def answering(self) -> bool:
        ready = bool(self.nodes) and all(
            node.answering and not node.astray for node in self._others
        )
        return ready and super().answering

    @property
    def resetting(self) -> bool:
        return super().resetting or any(node.resetting for node in self._others)

    def new_step(self) -> None:
        super().new_step()
        self._step += 1
        for node in self._others:
            node.new_step()
        self._was_cleared &= not self.nodes or self.resetting
        self._make_nodes()
        self._tell()

    def step_ended(self) -> None:
        """The oldest step that had not ended has. ``reported`` got what came of it."""
        self._ended = min(self._ended + 1, self._step)
        for node in self._others:
            node.step_ended(self._ended)

    def outgoing(self) -> list[tuple[ToAgent, list[Settling]]]:
        """What this step brings to each other node."""
        return [node.outgoing(self._step, self._ended) for node in self._others]

    def close(self) -> None:
        for node in self._others:
            node.close()
        super().close()

    # ------------------------------------------------------------ reading

    def look_up(
        self,
        request: str,
        digests: bytes,
        width: int,
        first: int,
        context: RequestContext = NO_CONTEXT,
        blocks: BlockHashes | None = None,
    ) -> Found:
        if not self._others:
            return super().look_up(request, digests, width, first, context, blocks)
        if any(not node.connected or node.astray for node in self._others):
            self.give_back(request)
            return Found(None, "no_daemon")
        if self.resetting:
            return Found(None, "clearing")
        asked = self._asked.get(request)
        if asked is None or (asked.first, asked.digests) != (first, digests):
            asked = self._asked[request] = _Asked(first, digests)
        while True:
            keys = digests if asked.chunks is None else digests[: asked.chunks * width]
            own = super().look_up(request, keys, width, first, context, blocks)
            if own.match is None:
                self._leave_others(request)
                return own
            if isinstance(own.match, Pending) and not own.promoting:
                return own
            found = self._ask_others(request, asked, keys, width, context, blocks, own.match)
            for node, one in zip(self._others, found, strict=True):
                if one.match is None and isinstance(own.match, Match):
                    return self._missed(request, own, node, first)
            matches = [one.match for one in (own, *found) if isinstance(one.match, Match)]
            if len(matches) <= len(found):
                return Found(PENDING, promoting=any(one.promoting for one in (own, *found)))
            own = own._replace(kept=min(one.kept for one in (own, *found)))
            end = min((match.chunks, match.blocks) for match in matches)
            ends = [(match.chunks, match.blocks) for match in matches]
            shortest = ends.index(end)
            if shortest:
                asked.cut = self._cut(matches[0], self._others[shortest - 1], *end)
            elif not asked.rounds:
                asked.cut = ""
            if self._cuts or ends.count(end) == len(ends):
                if asked.cut:
                    own = own._replace(why=OTHER_NODE, detail=asked.cut)
                return own._replace(match=together(matches, self._boot_of_all, cuts=self._cuts))
            asked.chunks, asked.rounds = end[0] + self._spare, asked.rounds + 1
            if asked.rounds > ROUNDS:
                return self._missed(request, own, self._others[max(0, shortest - 1)], first)
            for client, match in zip(self._clients, matches, strict=True):
                if match.chunks > end[0]:
                    client.lookups.restart(request)

    def _missed(self, request: str, own: Found, node: StepClient, first: int) -> Found:
        """The answer if a node has nothing of what the own daemon has."""
        assert isinstance(own.match, Match)
        detail = self._cut(own.match, node, first, 0)
        super().give_back(request)
        self._leave_others(request)
        return own._replace(match=None, why=OTHER_NODE, detail=detail)

    def _leave_others(self, request: str) -> None:
        """It is a miss, so the request makes steps."""
        self._asked.pop(request, None)
        for node in self._others:
            node.let_go(request)

    def _cut(self, own: Match, node: StepClient, chunks: int, blocks: int) -> str:
        """What is said if a node has no more than so many chunks and blocks of ``own``."""
        has, of = self._tokens(chunks, blocks), self._tokens(own.chunks, own.blocks)
        return f"{node.name} had {has:,} of {of:,} tokens"

    def _ask_others(
        self,
        request: str,
        asked: _Asked,
        digests: bytes,
        width: int,
        context: RequestContext,
        blocks: BlockHashes | None,
        own: Match | Pending,
    ) -> list[Found]:
        """What the other nodes have of what ``own`` has, or may yet load."""
        context, limit = msgspec.structs.replace(context, reported=False), blocks
        end = own.chunks if isinstance(own, Match) else len(digests)
        keys = digests[: (end + self._spare) * width]
        if blocks is not None and isinstance(own, Match):
            limit = partial(_within, blocks, own, width)
        found = list[Found]()
        for node in self._others:
            if node in asked.lack:
                found.append(Found(None))
                continue
            node.lookups.share_time(request, self.lookups)
            one = node.look_up(request, keys, width, asked.first, context, limit)
            early = node.lookups.in_flight(request)[1] > end + self._spare
            if isinstance(one.match, Match):
                early = one.match.chunks > end and not self._cuts and not asked.rounds
            if early:  # it was asked before that was known
                node.let_go(request)
                node.lookups.share_time(request, self.lookups)
                one = node.look_up(request, keys, width, asked.first, context, limit)
            if one.match is None and one.why not in CLIENTS:
                asked.lack.add(node)
            found.append(one)
        return found

    def take(self, request: str) -> Match | None:
        if not self._others:
            return super().take(request)
        self._asked.pop(request, None)
        matches = [super().take(request), *(node.take(request) for node in self._others)]
        taken = [match for match in matches if match is not None]
        if len(taken) < len(matches):
            for client, match in zip(self._clients, matches, strict=True):
                if match is not None:
                    SchedulerClient.release(client, match.boot, match.lease)
            return None
        match = together(taken, self._boot_of_all, cuts=self._cuts)
        self.lent.matches[match.lease] = tuple(taken)
        return match

    def give_back(self, request: str) -> None:
        self._asked.pop(request, None)
        super().give_back(request)
        for node in self._others:
            node.give_back(request)

    def release(self, boot: bytes, lease: int) -> None:
        if not self._others:
            super().release(boot, lease)
            return
        for client, match in zip(self._clients, self.lent.matches.pop(lease, ()), strict=False):
            SchedulerClient.release(client, match.boot, match.lease)

    def prefetch(
        self,
        request: str,
        digests: bytes,
        width: int,
        first: int = 0,
        context: RequestContext = NO_CONTEXT,
        budget_s: float = 60.0,
    ) -> Prefetching | None:
        own = super().prefetch(request, digests, width, first, context, budget_s)
        if own is None or not self._others:
            return own
        asked = digests, width, first, context, budget_s
        return _PrefetchingAll(request, own.seq, own.connection, asked)

    def _promoted(self, one: Prefetching, chunks: int) -> None:
        if not isinstance(one, _PrefetchingAll):
            return
        digests, width, first, context, budget_s = one.asked
        keys = digests[: chunks * width]  # more than the own daemon has is no hit
        for node in self._others if chunks > first else ():
            ahead = node.prefetch(one.request, keys, width, first, context, budget_s)
            if ahead is not None:
                one.begun.append((node, ahead))

    def _begun(self, one: Prefetching) -> list[tuple[StepClient, Prefetching]]:
        """What the other nodes that are still there do of a prefetch."""
        begun = one.begun if isinstance(one, _PrefetchingAll) else []
        return [(node, ahead) for node, ahead in begun if node in self._others]

    def prefetched(self, one: Prefetching) -> bool:
        own = super().prefetched(one)
        return own and all(node.prefetched(ahead) for node, ahead in self._begun(one))

    def leave_prefetch(self, one: Prefetching) -> None:
        super().leave_prefetch(one)
        for node, ahead in self._begun(one):
            node.leave_prefetch(ahead)

    def end_prefetch(self, one: Prefetching) -> None:
        super().end_prefetch(one)
        for node, ahead in self._begun(one):
            node.end_prefetch(ahead)

    def end_session(self, context: RequestContext) -> bool:
        told = [node.end_session(context) for node in self._others]
        return super().end_session(context) and all(told)

    # ------------------------------------------------------------ writing

    def begin_reserve(
        self, items: Sequence[ReserveItem], width: int, wait: bool = True
    ) -> Reserving | None:
        if not self._others:
            return super().begin_reserve(items, width, wait)
        parts = list[Reserving]()
        for client in self._clients if self.answering else ():
            part = SchedulerClient.begin_reserve(client, items, width, wait and not parts)
            if part is None:
                break
            parts.append(part)
        own = parts[0] if parts else None
        if own is None or len(parts) < len(self._clients):
            for client, sent in zip(self._clients, parts, strict=False):
                SchedulerClient.give_up(client, sent)
            return None
        fields = own.seq, own.items, own.asked_s, own.wait_s
        return ReservingAll(*fields, self._clients, tuple(parts), self.form)

    def granted(self, reserving: Reserving) -> Granted | SendApart | Pending | None:
        if not isinstance(reserving, ReservingAll):
            return super().granted(reserving)
        if reserving.form != self.form:
            return None
        if not isinstance(granted := reserving.granted(), list):
            return granted
        self._giver = self._giver or self.connection
        return self.lent.grant(granted, self._boot_of_all)

    def give_up(self, reserving: Reserving) -> None:
        if not isinstance(reserving, ReservingAll):
            super().give_up(reserving)
        elif reserving.form == self.form:
            reserving.give_up()

    def abort(self, boot: bytes, reservation: int) -> None:
        if not self._others:
            super().abort(boot, reservation)
            return
        for client, part in zip(self._clients, self.lent.grants.pop(reservation, ()), strict=False):
            if part is not None:
                SchedulerClient.abort(client, part.boot, part.number)

    # ------------------------------------------------------------ the rest

    def handed_over(self, leases: Sequence[int], reservations: Sequence[int], boot: bytes) -> bool:
        if not self._others:
            return super().handed_over(leases, reservations, boot)
        connection, known = self.connection, self.lent.own(leases, reservations)
        if connection is None or boot != self._boot_of_all or known is None:
            return False
        told = super().handed_over(leases, known, connection.boot)
        if told:
            self.lent.forget(leases, reservations)
        return told

    def tell_uncached(self, why: str) -> None:
        self._uncached = why
        for client in self._clients:
            SchedulerClient.tell_uncached(client, why)

    def clear(self, timeout_s: float) -> bool:
        self._was_cleared = True
        self._asked.clear()
        for node in self._others:
            node.clear(0.0)
        return super().clear(timeout_s) and not self.resetting

    def new_generation(self, token: bytes = b"") -> None:
        self._asked.clear()
        token = token or os.urandom(GENERATION_BYTES)
        for client in self._clients:
            SchedulerClient.new_generation(client, token)


def _within(blocks: BlockHashes, own: Match, width: int, chunk: int) -> bytes:
    """``blocks`` as far as ``own`` goes."""
    return blocks(chunk)[: own.blocks * width] if chunk == own.chunks else blocks(chunk)
