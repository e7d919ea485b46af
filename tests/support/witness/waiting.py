"""Observes requests that the core answers in a later step, because they wait for tiers.

An answer must count the rows that were READY, or sure to come, when the request was asked, and that
were not spoiled since.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from kvass import messages as m
from kvass.core.effects import Effect, Send, TierClear, TierEpoch
from tests.support.witness.records import BrokenLawError, Namespace, Pending, split
from tests.support.witness.state import ObservedState


class WaitingWitness:
    """Checks when such requests are answered, and what must be counted."""

    def __init__(self, state: ObservedState) -> None:
        self.state = state

    def begin(self, connection: int, message: m.Request) -> Pending:
        """``message`` was not answered in its step."""
        state = self.state
        if (connection, message.seq) in state.pending:
            raise BrokenLawError(f"law 11: {message} was not answered")
        one = state.pending[connection, message.seq] = Pending(connection, message)
        if isinstance(message, m.Lookup | m.Prefetch):
            lookup_ms = state.config.timing.lookup_budget_ms
            default = lookup_ms if isinstance(message, m.Lookup) else 60_000.0
            one.due = state.now + min((message.budget_ms or default) / 1000, 300.0)
            if not one.due > state.now:
                raise BrokenLawError(f"law 5: {message} leaves no time, yet waits")
            one.namespace = state.namespace_of(connection, message)
            if one.namespace is None:
                raise BrokenLawError(f"{message} waits for tiers without a namespace")
            one.epoch = one.namespace.epoch
            keys = state.asked_keys(one.namespace, message)
            one.sure_until = self._sure_until(one, one.namespace, message, keys)
            self._promise(one, one.namespace, keys)
        return one

    def prefetches_ended(self, connection: int, request: str) -> None:
        """The prefetches of a request were ended: in this step they are answered with what there
        is."""
        for one in self.state.pending.values():
            asked, its = one.message, one.connection == connection
            if its and isinstance(asked, m.Prefetch) and asked.request == request:
                one.sure_until = self.state.now

    def _written(self, one: Pending) -> bool:
        """Whether a lookup that waits for such rows names one that is being written."""
        message, written = one.message, self.state.being_written()
        if not isinstance(message, m.Lookup) or not message.writing or one.namespace is None:
            return False
        keys = {*self.state.asked_keys(one.namespace, message)}
        keys |= {*split(message.blocks, message.width)}
        return any(row[0] is one.namespace and row[2] in keys for row in written)

    def check_answered_at_once(self, namespace: Namespace, msg: m.Lookup, chunks: int) -> None:
        """A lookup that waits for rows that are being written is not answered while they would make
        its hit longer."""
        state, written = self.state, self.state.being_written()
        wait_s = (msg.budget_ms or state.config.timing.lookup_budget_ms) / 1000
        many_may_wait = state.config.limits.waiting_bytes >= 1 << 20
        if not msg.writing or msg.again or state.now + wait_s <= state.now or not many_may_wait:
            return
        longer = namespace.longest(
            lambda g, k: (namespace, g, k) in written or state.surely_ready((namespace, g, k)),
            state.asked_keys(namespace, msg),
            msg.first,
            msg.spare,
        )
        if longer > chunks:
            raise BrokenLawError(f"{longer} chunks are written, but {chunks} told at once: {msg}")

    def _sure_until(
        self,
        one: Pending,
        namespace: Namespace,
        message: m.Lookup | m.Prefetch,
        keys: list[bytes],
    ) -> float:
        """Before this time the core does not give up. If a part is READY, it waits for the rest no
        longer than computing it takes, or, if the asker does not know its speed, the rest's share
        of the budget. This is a lower bound: evicted rows are not known here."""
        if isinstance(message, m.Prefetch):
            return one.due
        state = self.state
        ready = namespace.longest(
            lambda g, k: (namespace, g, k) in state.ready, keys, message.first, message.spare
        )
        if ready == message.first:
            return one.due
        speed, left = message.prefill_tokens_s, len(keys) - ready
        if 0 < speed < inf:
            left_s = left * namespace.chunk_tokens / speed
        else:
            left_s = (one.due - state.now) * left / (len(keys) - message.first)
        return min(one.due, state.now + max(left_s, state.config.timing.lookup_budget_ms / 1000))

    def _promise(self, one: Pending, namespace: Namespace, keys: list[bytes]) -> None:
        """Note which rows are READY, and which a healthy tier is sure to deliver."""
        state = self.state
        rows = [(namespace, g, key) for g in range(namespace.groups) for key in keys]
        for row in rows:
            if (source := state.ready.get(row, (None,))[0]) is not None:
                one.before[row] = source
        weighed = isinstance(one.message, m.Lookup) and one.message.prefill_tokens_s
        weighed = weighed and state.config.skip_slow_loads
        if state.holds is None or weighed or len(set(keys)) < len(keys):
            return
        digest = state.digest(namespace)
        if not all(state.known_epochs(digest)) or any(
            isinstance(op, TierClear) or (isinstance(op, TierEpoch) and op.namespace == digest)
            for op in state.ops.values()
        ):
            return
        taken = state.being_written()
        one.promised |= {row for row in rows if row not in taken and any(state.holders(row))}

    def sure(self, one: Pending) -> Callable[[int, bytes], bool]:
        """Which rows the answer to ``one`` must count, if nothing is evicted."""
        state, namespace = self.state, one.namespace
        assert namespace is not None

        def there(group: int, key: bytes) -> bool:
            row = namespace, group, key
            if row in one.spoiled or namespace.epoch != one.epoch:
                return False
            if row in one.promised and state.now < one.sure_until:
                return True
            if not state.config.tiers:
                return state.surely_ready(row)
            return state.surely_ready(row) and state.ready[row][0] is one.before.get(row)

        return there

    def forget(self, connection: int) -> None:
        """The connection's requests need no answer any more."""
        for at in [at for at in self.state.pending if at[0] == connection]:
            del self.state.pending[at]

    def late_answers(self, effects: list[Effect]) -> dict[int, Pending]:
        """By index: which of ``effects`` answer a request of an earlier step."""
        late = {}
        for i, effect in enumerate(effects):
            if isinstance(effect, Send):
                one = self.state.pending.get((effect.connection, effect.message.seq))
                if one is not None:
                    late[i] = one
        return late

    def check_overdue(self) -> None:
        """Law 5: an answer comes by the first step at its deadline, or when the tiers are done."""
        state = self.state
        for one in () if state.behind else state.pending.values():
            clears = isinstance(one.message, m.Clear)
            if one.due <= state.now or (clears and not one.awaits):
                raise BrokenLawError(f"law 5: {one.message} is not answered at {state.now}")
            if not (state.config.tiers or self._written(one)):
                raise BrokenLawError(f"law 11: {one.message} waits for nothing")
            if not any(x.namespace is one.namespace for x in state.instances.values()):
                one.promised.clear()  # the core may forget a namespace without instances

    # ------------------------------------------------------------ clears

    def cleared(self, one: Pending) -> None:
        """A clear was asked: from now on no older row matches; in later boots once confirmed."""
        state, message = self.state, one.message
        assert isinstance(message, m.Clear)
        if message.everything:
            namespaces = list(state.namespaces.values())
        elif message.namespace:
            found = state.by_digest.get(message.namespace)
            namespaces = [] if found is None else [found]
        else:
            own = state.roles[one.connection][0].namespace
            namespaces = [] if own is None else [own]
        gone = [key for key in state.ready if key[0] in namespaces]
        one.rows = len(gone)
        one.sure_rows = sum(map(state.surely_ready, gone))
        for namespace in namespaces:
            namespace.epoch += 1
            state.archive.clears[namespace.key] += 1
            # A clear of everything covers the namespaces that the daemon knows: those in use.
            in_use = any(x.namespace is namespace for x in state.instances.values())
            if not message.everything or in_use:
                namespace.floor = state.archive.clears[namespace.key]
                one.namespaces.append((namespace, namespace.floor))
        for digest, tier in list(state.epochs):
            if state.by_digest[digest] in namespaces:
                del state.epochs[digest, tier]
        for key in gone:
            del state.ready[key]
            state.needless.discard(key)

    def clear_answered(self, one: Pending, reply: m.FromDaemon) -> None:
        """Either every tier has noted the clear, or the reply is an error."""
        if one.awaits:
            raise BrokenLawError(f"law 8: {reply}, but operations {one.awaits} are open")
        if isinstance(reply, m.Error):
            if not one.failed or reply.code != "tier_down":
                raise BrokenLawError(f"every tier has noted the clear, yet: {reply}")
            return
        if one.failed or not isinstance(reply, m.Cleared):
            raise BrokenLawError(f"law 8: some tier did not note the clear, yet: {reply}")
        if reply.rows > one.rows or (self.state.roomy and reply.rows < one.sure_rows):
            raise BrokenLawError(f"cleared {reply.rows} rows where {one.rows} were READY")
        floor = self.state.archive.floor
        for namespace, clears in one.namespaces:
            floor[namespace.key] = max(floor.get(namespace.key, 0), clears)
