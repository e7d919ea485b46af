"""The answers that wait for tiers, to a witness: what they must say by when.

Law of this file: as ``witness``: events and effects only. What an answer must count is what was so
when it was asked and has not been spoiled since.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any

from kvass import messages as m
from kvass.core.effects import Effect, Send, TierClear, TierEpoch, ToTier
from kvass.testing.books import Books, BrokenLawError, Fill, RowKey, Source, Space, split


@dataclass(eq=False, slots=True)
class Pending:
    """A request that is answered later, and what was so when it was asked.

    ``before``: the READY rows among those it asks for; ``promised``: those that a tier is sure to
    give; neither counts once its key is ``spoiled``. ``awaits``: of a clear, what the tiers are to
    do for it; ``spaces`` with how often they were cleared then.
    """

    session: int
    message: m.Request
    due: float = inf
    sure_until: float = inf
    space: Space | None = None
    epoch: int = 0
    before: dict[RowKey, Source] = field(default_factory=dict)
    promised: set[RowKey] = field(default_factory=set)
    spoiled: set[RowKey] = field(default_factory=set)
    awaits: set[int] = field(default_factory=set)
    failed: bool = False
    rows: int = 0
    sure_rows: int = 0
    spaces: list[tuple[Space, int]] = field(default_factory=list)


class WaitingWitness(Books):
    """The part of the witness that watches requests whose answers wait."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.watch((), True, True)
        self.holds: Callable[[bytes, int, int, bytes, int], bool] | None = None
        """Where tiers are well: whether (namespace, epoch, group, chunk hash) is in that one."""
        self.ops: dict[int, ToTier] = {}
        self.told: dict[tuple[bytes, int], list[int]] = {}
        """The epochs that a tier has told since the namespace was cleared last."""
        self.pending: dict[tuple[int, int], Pending] = {}

    def watch(self, names: tuple[str, ...], retain: bool, weigh: bool) -> None:
        """The core has these tiers, and is to treat what they bring like this."""
        self.names, self.retain, self.weigh = names, retain, weigh

    def wait(self, session: int, message: m.Request, now: float) -> None:
        """``message`` was not answered in its step."""
        if not self.names or (session, message.seq) in self.pending:
            raise BrokenLawError(f"law 11: {message} was not answered")
        one = self.pending[session, message.seq] = Pending(session, message)
        if isinstance(message, m.Lookup | m.Prefetch):
            default = self.timing.lookup_budget_ms if isinstance(message, m.Lookup) else 60_000.0
            one.due = now + min((message.budget_ms or default) / 1000, 300.0)
            if not one.due > now:
                raise BrokenLawError(f"law 5: {message} leaves no time, yet waits")
            one.space = self.space_of(session, message)
            if one.space is None:
                raise BrokenLawError(f"{message} waits for tiers, but of what namespace?")
            one.epoch = one.space.epoch
            one.sure_until = self._sure_until(one, one.space, message, now)
            self._promise(one, one.space, split(message.digests, message.width), now)

    def _sure_until(
        self, one: Pending, space: Space, message: m.Lookup | m.Prefetch, now: float
    ) -> float:
        """Before this it does not give up. If L1 has a part, it waits no longer than computing the
        rest takes, or the rest's share of the budget if the asker does not know its speed. We know
        the rest from below only: of what was evicted we may not know."""
        if isinstance(message, m.Prefetch):
            return one.due
        keys = split(message.digests, message.width)
        ready = space.longest(
            lambda g, k: (space, g, k) in self.ready, keys, message.first, message.spare
        )
        if ready == message.first:
            return one.due
        speed, left = message.prefill_tokens_s, len(keys) - ready
        if 0 < speed < inf:
            left_s = left * space.chunk_tokens / speed
        else:
            left_s = (one.due - now) * left / (len(keys) - message.first)
        return min(one.due, now + max(left_s, self.timing.lookup_budget_ms / 1000))

    def space_of(self, session: int, message: m.Lookup | m.Prefetch) -> Space | None:
        """Of which namespace it asks."""
        if session in self.roles:
            return self.roles[session][0].space
        return self.by_digest.get(getattr(message, "namespace", b""))

    def _promise(self, one: Pending, space: Space, keys: list[bytes], now: float) -> None:
        rows = [(space, g, key) for g in range(space.groups) for key in keys]
        for row in rows:
            if (source := self.ready.get(row, (None,))[0]) is not None:
                one.before[row] = source
        weighed = self.weigh and isinstance(one.message, m.Lookup) and one.message.prefill_tokens_s
        if self.holds is None or weighed or len(set(keys)) < len(keys):
            return
        digest = next(d for d, s in self.by_digest.items() if s is space)
        epochs = self._told(digest)
        if not all(epochs) or any(
            isinstance(x, TierClear) or (isinstance(x, TierEpoch) and x.namespace == digest)
            for x in self.ops.values()
        ):
            return
        being_written = {
            row
            for w in self.writings.values()
            if w.space is space and w.epoch == space.epoch and w.holds(now)
            for row in w.keys
        }
        for row in rows:
            held = any(
                self.holds(digest, told[-1], *row[1:], tier) for tier, told in enumerate(epochs)
            )
            if held and row not in being_written:
                one.promised.add(row)

    def _told(self, digest: bytes) -> list[list[int]]:
        return [self.told.get((digest, tier), []) for tier in range(len(self.names))]

    def spoil(self, row: RowKey) -> None:
        """It is being written anew, or was found to be wrong."""
        for one in self.pending.values():
            one.spoiled.add(row)

    def sure(self, one: Pending, now: float) -> Callable[[int, bytes], bool]:
        """Which rows the answer to ``one`` must count, where nothing is evicted."""
        space = one.space
        assert space is not None

        def there(group: int, key: bytes) -> bool:
            row = space, group, key
            if row in one.spoiled or space.epoch != one.epoch:
                return False
            if row in one.promised and now < one.sure_until:
                return True
            known = one.before.get(row)
            return self.surely_ready(row) and self.ready[row][0] is known

        return there

    def surely_ready(self, row: RowKey) -> bool:
        """It was not given up behind our back, if nothing was evicted."""
        source = self.ready.get(row, (None,))[0]
        return source is not None and not (isinstance(source, Fill) and source.passing)

    def forget(self, session: int) -> None:
        """Nobody waits there any more."""
        for at in [at for at in self.pending if at[0] == session]:
            del self.pending[at]

    def late_answers(self, effects: list[Effect]) -> dict[int, Pending]:
        """Which of ``effects``, by place, answer what was asked in an earlier step."""
        late = {}
        for i, effect in enumerate(effects):
            if isinstance(effect, Send):
                one = self.pending.get((effect.session, effect.message.seq))
                if one is not None:
                    late[i] = one
        return late

    def nobody_waits_too_long(self, now: float) -> None:
        """Law 5 of answers: by the first step at their deadline, or when the tiers are done."""
        for one in self.pending.values():
            clears = isinstance(one.message, m.Clear)
            if one.due <= now or (clears and not one.awaits):
                raise BrokenLawError(f"law 5: {one.message} is not answered at {now}")
            if not any(member.space is one.space for member in self.members.values()):
                one.promised.clear()  # the core may forget a namespace that nobody has

    def clear_answered(self, one: Pending, reply: m.FromDaemon) -> None:
        """Every tier has taken note, or it says so."""
        if one.awaits:
            raise BrokenLawError(f"law 8: {reply}, but operations {one.awaits} are open")
        if isinstance(reply, m.Error):
            if not one.failed or reply.code != "tier_down":
                raise BrokenLawError(f"every tier has taken note, yet: {reply}")
            return
        if one.failed or not isinstance(reply, m.Cleared):
            raise BrokenLawError(f"law 8: some tier took no note, yet: {reply}")
        if reply.rows > one.rows or (self.roomy and reply.rows < one.sure_rows):
            raise BrokenLawError(f"cleared {reply.rows} rows where {one.rows} were READY")
        self.confirm(one.spaces)

    def confirm(self, spaces: list[tuple[Space, int]]) -> None:
        """What was written before so many clears matches in no boot any more."""
        floor = self.archive.floor
        for space, clears in spaces:
            floor[space.key] = max(floor.get(space.key, 0), clears)
