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
        "row_store.py",
        "_IN_TRANSIT: Final = (WRITING, LOADING, QUARANTINED)",
        "_IN_TRANSIT: Final = (WRITING, QUARANTINED)",
    ),
    one(
        "a row that a tier could not give is still found",
        4,
        "promote.py",
        "    state.store.fail(bad)\n",
        "",
    ),
    one(
        "a row that a tier could not give is published",
        4,
        "promote.py",
        "    good = event.which\n",
        "    good = np.ones_like(event.which)\n",
    ),
    one(
        "a promotion does not wait for what it uses",
        4,
        "promote.py",
        "            promotion.awaits.add(state.promotions.loading[row])\n",
        "            pass\n",
    ),
    one(
        "the proof of a promoted match is not waited for",
        4,
        "promote.py",
        "    promotion.parts, promotion.spares = view.use(promotion.chunks)\n",
        "    promotion.parts, _ = view.use(promotion.chunks)\n",
    ),
    one(
        "a key said twice is loaded twice",
        3,
        "promote.py",
        "        home[repeated(promotion.keys)] = DUPLICATE\n",
        "        pass\n",
    ),
    one(
        "a load goes to the slots of its rows in another order",
        4,
        "promote.py",
        "records, state.store.slots(rows), c.spec.shard_bytes))",
        "records, state.store.slots(rows[::-1]), c.spec.shard_bytes))",
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
        "            view.use(end)  # nothing",
        "            # nothing",
    ),
    # ------------------------------------------------------------ pins and answers
    one(
        "a promotion that was answered stays pinned",
        7,
        "promote.py",
        "    state.send(promotion.session, reply)\n    _let_go(state, promotion)\n",
        "    state.send(promotion.session, reply)\n",
    ),
    one(
        "a promotion that nobody waits for stays pinned",
        7,
        "promote.py",
        "        state.promotions.drop(promotion, promotion.size_bytes)\n"
        "        _let_go(state, promotion)\n",
        "        state.promotions.drop(promotion, promotion.size_bytes)\n",
    ),
    one(
        "a lookup's budget is ignored",
        5,
        "promote.py",
        "    for promotion in state.promotions.due(state.now, SLICE):\n",
        "    for promotion in ():\n",
    ),
    one(
        "a lookup whose time is up waits for what is LOADING",
        5,
        "promote.py",
        "        _hold(state, promotion, READY)\n",
        "        _hold(state, promotion, LOADING)\n",
    ),
    one(
        "a promotion is answered to an instance that lacks a rank",
        10,
        "promote.py",
        "    if (promotion.readers and not there) or",
        "    if",
    ),
    one(
        "a namespace is forgotten, and promoted for",
        7,
        "admission.py",
        "    promote.cancel(state, ns)  # a tier may not have said yet what it holds\n",
        "",
    ),
    one(
        "a transient row is freed while somebody reads it",
        6,
        "row_store.py",
        "leaving &= table.pins[rows] == 0",
        "leaving &= (table.pins[rows] == 0) | (states == TRANSIENT)",
    ),
    one(
        "a transient row stays",
        6,
        "row_store.py",
        "READY if retain else TRANSIENT",
        "READY",
    ),
    # ------------------------------------------------------------ flushing
    Mutant(
        "what a tier reads is not pinned",
        6,
        (
            ("flush.py", "    state.store.pin(rows)\n", ""),
            ("flush.py", "    state.store.unpin(op.part.rows)\n", ""),
        ),
    ),
    one(
        "what a tier has read stays pinned",
        7,
        "flush.py",
        "    state.store.unpin(op.part.rows)\n",
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
        "    keys = state.store.table.keys_of(rows).copy()\n    records",
        "    keys = state.store.table.keys_of(rows[::-1]).copy()\n    records",
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
        '    counters["store_failures"] += int((~event.which).sum())\n'
        "    store_next(state, op.tier)\n",
        '    counters["store_failures"] += int((~event.which).sum())\n',
    ),
    one(
        "a busy tier that was down is due at once, over and over",
        7,
        "tier_state.py",
        "            if queue and 0 < failures < _MOST_FAILURES and not out\n",
        "            if queue and 0 < failures < _MOST_FAILURES\n",
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
        "an answer of before a clear is taken for one to it",
        8,
        "epochs.py",
        "    if op.epoch == ns.epoch:\n",
        "    if True:\n",
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
        "tier_state.py",
        "[self._boot, digest, self._epochs",
        "[digest, self._epochs",
    ),
    one(
        "a note that is lower than what was seen is adopted",
        8,
        "epochs.py",
        "    highest = max(asked.known, noted)\n",
        "    highest = noted or asked.known\n",
    ),
    one(
        "a fresh epoch counts from the one it finds, and not from the clock",
        8,
        "epochs.py",
        "max((highest >> _RANDOM_BITS) + 1, min(int(clock_s), _LATEST))",
        "(highest >> _RANDOM_BITS) + 1",
    ),
    one(
        "a fresh epoch goes by the clock alone",
        8,
        "epochs.py",
        "max((highest >> _RANDOM_BITS) + 1, min(int(clock_s), _LATEST))",
        "min(int(clock_s), _LATEST)",
    ),
    one(
        "a tier that is back is not asked for its notes",
        8,
        "machine.py",
        "    if back:\n",
        "    if False:\n",
    ),
    one(
        "notes are never read again",
        8,
        "epochs.py",
        "(tier == back or state.now - when >= LOOK_AGAIN_S - 1)",
        "tier == back",
    ),
    one(
        "another daemon's epoch is adopted when the note is read again",
        8,
        "epochs.py",
        "        if event.epoch is not None and (op.renew or ns.tier_epochs[tier] is None):\n",
        "        if event.epoch is not None:\n",
    ),
    one(
        "a clear is confirmed to a session that must go",
        11,
        "epochs.py",
        "    if clearing.awaits or session is None or session.ending:\n",
        "    if clearing.awaits or session is None:\n",
    ),
]
