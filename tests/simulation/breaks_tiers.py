"""Breaks of promotion, flushing and epochs: what tiers may touch, and what may match after them.

Law of this file: each says what it breaks; ``mutants`` applies and judges them.
"""

from __future__ import annotations

from tests.simulation.mutant import Mutant, one

BREAKS = [
    # ------------------------------------------------------------ LOADING rows
    one(
        "a clear frees what a tier is still writing to",
        3,
        "l1.py",
        "        self.table.doomed[rows[state == LOADING]] = True\n",
        "        self.free(rows[state == LOADING])\n",
    ),
    one(
        "a row that a tier could not give is still found",
        4,
        "promote.py",
        "    state.l1.fail(bad)\n",
        "",
    ),
    one(
        "a row that a tier could not give is published",
        4,
        "promote.py",
        "    good = event.which & ~table.doomed[rows]\n",
        "    good = ~table.doomed[rows]\n",
    ),
    one(
        "what was loaded for a cleared namespace is published",
        8,
        "promote.py",
        "    good = event.which & ~table.doomed[rows]\n",
        "    good = event.which\n",
    ),
    one(
        "a promotion does not wait for what it uses",
        4,
        "promote.py",
        "            one.awaits.add(state.promotions.loading[row])\n",
        "            pass\n",
    ),
    one(
        "the proof of a promoted match is not waited for",
        4,
        "promote.py",
        "        proof.append(Part(c.id, after))\n",
        "        proof.append(Part(c.id, after[:0]))\n",
    ),
    one(
        "a key said twice is loaded twice",
        3,
        "promote.py",
        "        home[repeated(one.keys)] = _NOT_AGAIN\n",
        "        pass\n",
    ),
    one(
        "a load goes to the slots of its rows in another order",
        4,
        "promote.py",
        "records, state.l1.slots(rows), c.spec.shard_bytes))",
        "records, state.l1.slots(rows[::-1]), c.spec.shard_bytes))",
    ),
    one(
        "what a tier holds is read off as another group's",
        4,
        "promote.py",
        "event.held[at : at + len(wanted)]",
        "event.held[: len(wanted)]",
    ),
    one(
        "any share of L1 may be LOADING",
        12,
        "promote.py",
        "    left = int(state.config.arena_bytes * LOADING_SHARE) - state.tiers.loading_bytes\n",
        "    left = 1 << 60\n",
    ),
    one(
        "a promotion evicts its own prefix",
        6,
        "promote.py",
        "            _touch(state, one, found, end)  # nothing",
        "            # nothing",
    ),
    # ------------------------------------------------------------ pins and answers
    one(
        "a promotion that was answered stays pinned",
        7,
        "promote.py",
        "        state.send(one.session, matched)\n    _let_go(state, one)\n",
        "        state.send(one.session, matched)\n",
    ),
    one(
        "a promotion that nobody waits for stays pinned",
        7,
        "promote.py",
        "        state.promotions.drop(one)\n        _let_go(state, one)\n",
        "        state.promotions.drop(one)\n",
    ),
    one(
        "a lookup's budget is ignored",
        5,
        "promote.py",
        "    for one in state.promotions.due(state.now):\n",
        "    for one in ():\n",
    ),
    one(
        "a lookup whose time is up waits for what is LOADING",
        5,
        "promote.py",
        "        _aim(state, one, (READY,))\n",
        "        _aim(state, one, (READY, LOADING))\n",
    ),
    one(
        "a promotion is answered to an instance that lacks a rank",
        10,
        "promote.py",
        "    if (one.readers and not there) or",
        "    if",
    ),
    one(
        "a namespace is forgotten, and promoted for",
        7,
        "admission.py",
        "    promote.void(state, ns)  # a tier may not have said yet what it holds\n",
        "",
    ),
    one(
        "a row that passes is freed while somebody reads it",
        6,
        "l1.py",
        "leaving = over & table.evictable(rows)",
        "leaving = over & table.evictable(rows) | table.passing[rows]",
    ),
    one(
        "what passes stays",
        6,
        "l1.py",
        "            self.table.passing[rows] = True\n            self._leaving += len(rows)\n",
        "            pass\n",
    ),
    # ------------------------------------------------------------ flushing
    Mutant(
        "what a tier reads is not pinned",
        6,
        (
            ("flush.py", "    state.l1.pin(rows)\n", ""),
            ("flush.py", "    state.l1.unpin(op.part.rows)\n", ""),
        ),
    ),
    one(
        "what a tier has read stays pinned",
        7,
        "flush.py",
        "    state.l1.unpin(op.part.rows)\n",
        "",
    ),
    one(
        "what is queued for a tier is flushed as what it was",
        4,
        "flush.py",
        "    rows: I64Array = queued.rows[same]\n",
        "    rows: I64Array = queued.rows[same | True]\n",
    ),
    one(
        "rows are flushed under each other's keys",
        4,
        "flush.py",
        "one.spec.group, state.l1.table.keys_of(rows).copy())",
        "one.spec.group, state.l1.table.keys_of(rows[::-1]).copy())",
    ),
    one(
        "only the first tier is written through to",
        7,
        "flush.py",
        "for part in parts:\n            _queue(state, part, range(len(state.config.tiers)))",
        "for part in parts:\n            _queue(state, part, range(len(state.config.tiers))[:1])",
    ),
    one(
        "a tier that has read what it may is not given more",
        7,
        "flush.py",
        '    counters["store_failures"] += int((~event.which).sum())\n    pump(state, op.tier)\n',
        '    counters["store_failures"] += int((~event.which).sum())\n',
    ),
    one(
        "a busy tier that was down is due at once, over and over",
        7,
        "tiers.py",
        "            if queue and 0 < failures < _GIVE_UP and not out\n",
        "            if queue and 0 < failures < _GIVE_UP\n",
    ),
    # ------------------------------------------------------------ epochs
    one(
        "a clear does not renew the epoch in tiers",
        8,
        "epochs.py",
        "    renew = named in state.tiers.owed\n",
        "    renew = False\n",
    ),
    one(
        "an owed renewal is forgotten",
        8,
        "epochs.py",
        "None if named in tiers.owed and not op.renew else event.epoch",
        "event.epoch",
    ),
    one(
        "a clear leaves the tiers' epoch in use",
        8,
        "epochs.py",
        "        ns.tier_epochs[tier] = None\n        state.tiers.owed.add((ns.digest, tier))\n",
        "        state.tiers.owed.add((ns.digest, tier))\n",
    ),
    one(
        "a clear is confirmed though a tier took no note",
        8,
        "epochs.py",
        "    if not done:\n",
        "    if False:\n",
    ),
    one(
        "epochs of two lives are the same",
        8,
        "tiers.py",
        "[self._boot, digest, self._epochs",
        "[digest, self._epochs",
    ),
    one(
        "of epochs whose questions crossed, the last told is used",
        8,
        "epochs.py",
        "    if epoch is not None and crossed:\n",
        "    if False:\n",
    ),
    one(
        "a clear is confirmed to a session that must go",
        11,
        "epochs.py",
        "    if one.awaits or session is None or session.ending:\n",
        "    if one.awaits or session is None:\n",
    ),
]
