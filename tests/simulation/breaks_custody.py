"""Breaks of who holds what, and of what is published (laws 2-4).

Law of this file: each says what it breaks; ``mutants`` applies and judges them.
"""

from __future__ import annotations

from tests.simulation.mutant import Mutant, one

BREAKS = [
    # ------------------------------------------------------------ law 2: ownership
    one(
        "a release by one rank counts for all",
        2,
        "custody.py",
        "        lease.owing.discard(rank)\n",
        "        lease.owing.clear()\n",
    ),
    one(
        "a release said twice counts twice",
        2,
        "custody.py",
        "        lease.owing.discard(rank)\n",
        "        lease.owing.pop()\n",
    ),
    one(
        "another instance's lease can be released",
        2,
        "checks.py",
        "if lease is not None and lease.instance != instance.id:",
        "if False:",
    ),
    one(
        "another instance's reservation can be settled",
        2,
        "checks.py",
        "if one is not None and one.instance != instance.id:",
        "if False:",
    ),
    one("a rank may speak for another", 2, "checks.py", "    if rank != own:\n", "    if False:\n"),
    one(
        "unknown ranks may be named",
        2,
        "checks.py",
        "if not 0 <= rank < instance.terms.ranks:",
        "if False:",
    ),
    one(
        "a second live session of a rank is admitted",
        2,
        "admission.py",
        "if instance.sessions.get(terms.rank, session.id) != session.id:",
        "if False:",
    ),
    one(
        "readers are inferred from who is registered",
        2,
        "flows.py",
        "(0,) if msg.readers is None else msg.readers",
        "tuple(instance.workers)",
    ),
    one(
        "missing readers mean every rank",
        2,
        "flows.py",
        "(0,) if msg.readers is None else msg.readers",
        "msg.readers or tuple(range(instance.terms.ranks))",
    ),
    Mutant(
        "every rank owes a commit, replicas too",
        2,
        (
            ("flows.py", "named = instance.writers if", "named = tuple(instance.workers) if"),
            ("flows.py", "    if not instance.covers_all_shards(writers):\n", "    if False:\n"),
        ),
    ),
    one(
        "replicas count as writers",
        2,
        "registry.py",
        "sorted(r for r, w in self.workers.items() if w.writer)",
        "sorted(self.workers)",
    ),
    one(
        "any ranks will do as writers",
        2,
        "registry.py",
        "return shards == list(range(self.terms.world_size))",
        "return True",
    ),
    # ------------------------------------------------------------ law 3: slots being written
    one(
        "a late slot is freed at the deadline",
        3,
        "custody.py",
        '                    self.discard(one, "late")\n',
        '                    self.discard(one, "late")\n                    one.owing.clear()\n',
    ),
    one(
        "an abort by one rank settles for all",
        3,
        "custody.py",
        '            self.discard(one, "aborted")\n            one.owing.discard(rank)\n',
        '            self.discard(one, "aborted")\n            one.owing.clear()\n',
    ),
    one(
        "the dma grace is skipped",
        3,
        "custody.py",
        "until = math.inf if exiting else now + self._timing.dma_grace_s",
        "until = math.inf if exiting else now",
    ),
    one(
        "an exiting process's slots are free at its EOF",
        3,
        "custody.py",
        "until = math.inf if exiting else now + self._timing.dma_grace_s",
        "until = now if exiting else now + self._timing.dma_grace_s",
    ),
    one(
        "an exiting process's slots wait for the grace only",
        3,
        "custody.py",
        "until = math.inf if exiting else now + self._timing.dma_grace_s",
        "until = now + self._timing.dma_grace_s",
    ),
    one(
        "slots are free at their writer's end, with no rest",
        3,
        "custody.py",
        "until = now + min(DEVICE_S, self._timing.dma_grace_s)",
        "until = now",
    ),
    one(
        "the end of one of several lost writers frees the slots of all",
        3,
        "custody.py",
        "                self._soil(one, session, until, now)\n\n",
        "                one.dirty = {session: until}\n"
        "                self._soil(one, session, until, now)\n\n",
    ),
    one(
        "two rows on one slot",
        3,
        "slots.py",
        "        self._count -= count\n"
        "        return self._rows[self._count : self._count + count][::-1].copy()\n",
        "        return self._rows[self._count - count : self._count][::-1].copy()\n",
    ),
    one(
        "an extent set is handed over while a slot is quarantined",
        3,
        "l1.py",
        "_IN_TRANSIT: Final = (WRITING, LOADING, QUARANTINED)",
        "_IN_TRANSIT: Final = (WRITING, LOADING)",
    ),
    Mutant(
        "and the set's guard sleeps too",
        3,
        (
            (
                "l1.py",
                "_IN_TRANSIT: Final = (WRITING, LOADING, QUARANTINED)",
                "_IN_TRANSIT: Final = (WRITING, LOADING)",
            ),
            (
                "l1.py",
                '        assert (self.table.state[rows] == FREE).all(), "an extent set in use was '
                'given away"\n',
                "",
            ),
        ),
    ),
    one(
        "the shard of a rank is its number",
        3,
        "registry.py",
        "layouts = [by_shard[s] for s in range(terms.world_size)]",
        "layouts = [instance.workers[s].layout for s in range(terms.world_size)]",
    ),
    one(
        "a rank is sent to another's shard",
        3,
        "l1.py",
        "tuple([self.extents.sets[i].bases for i in used.tolist()])",
        "tuple([self.extents.sets[i].bases[::-1] for i in used.tolist()])",
    ),
    one(
        "extents overlap",
        3,
        "extents.py",
        "            self.starts[i] += n\n            self.lengths[i] -= n\n",
        "            self.starts[i] += n // 2\n            self.lengths[i] -= n // 2\n",
    ),
    one(
        "a scheduler's loss cancels grants it had handed over",
        3,
        "custody.py",
        "        if one is not None and not one.handed_over:\n            self.cancel(one, now)",
        "        if one is not None:\n            self.cancel(one, now)",
    ),
    one(
        "a garbled scheduler's grants are taken back at once",
        3,
        "machine.py",
        "self.state.custody.presume_handed_over(who.instance)",
        "pass",
    ),
    one(
        "a session that owes commits is closed",
        3,
        "machine.py",
        "elif who is not None and self.state.custody.owes(who.instance, who.rank):",
        "elif False:",
    ),
    # ------------------------------------------------------------ law 4: publishing
    one(
        "a partial row is published",
        4,
        "custody.py",
        '            self.discard(one, "cleared")\n        one.owing.discard(rank)\n',
        '            self.discard(one, "cleared")\n        one.owing.clear()\n',
    ),
    one(
        "a dead writer's row is published",
        4,
        "custody.py",
        '            self.discard(one, "writer_lost")\n',
        "",
    ),
    one(
        "an aborted row is published once the others commit",
        4,
        "custody.py",
        '            self.discard(one, "aborted")\n',
        "",
    ),
    Mutant(
        "a commit after the discard publishes",
        4,
        (
            (
                "custody.py",
                "            for part in one.parts:\n                self.l1.discard(part.rows)\n",
                "",
            ),
            ("custody.py", "            if one.discarded:\n", "            if False:\n"),
        ),
    ),
    one("a row being written matches", 4, "l1.py", "self.table.state[found] == READY", "there"),
    one(
        "the index trusts a fingerprint",
        4,
        "index.py",
        "wrong = (rows == ABSENT) | (self._table.key[rows] != keys).any(axis=1)",
        "wrong = rows == ABSENT",
    ),
    one(
        "the index forgets what spilled",
        4,
        "index.py",
        "        return twins | (self._spilled[bucket] > 0)\n",
        "        return twins\n",
    ),
    one(
        "the reservation's deadline is ignored",
        5,
        "custody.py",
        "                if one.deadline <= now:\n",
        "                if False:\n",
    ),
    one(
        "a clear does not doom what is being written",
        4,
        "custody.py",
        "        if one.epoch != epoch:\n",
        "        if False:\n",
    ),
    one(
        "a cleared class still finds its rows",
        4,
        "l1.py",
        "            one.index.clear()\n",
        "",
    ),
    one(
        "a cleared class still evicts its rows",
        6,
        "l1.py",
        "            one.policy = self._policy(self.table)\n",
        "",
    ),
    one(
        "a row that was reported wrong still matches while it is read",
        4,
        "l1.py",
        '        """READY ``rows`` stop matching now, and are freed once nobody reads them."""\n'
        "        self._unindex(rows)\n",
        "",
    ),
    one(
        "an engine of a new generation stays in its namespace",
        10,
        "registry.py",
        "    if instance.generation:\n",
        "    if False:\n",
    ),
    one(
        "what old and new weights wrote together is published",
        10,
        "admission.py",
        "    state.custody.distrust(instance.id, state.now)\n",
        "    pass\n",
    ),
    one("a bad row stays", 8, "flows.py", "        state.l1.forget(rows)\n", ""),
]
