"""Breaks of pins, room, quiescence, limits and layer groups (laws 5-12).

Law of this file: each says what it breaks; ``mutants`` applies and judges them.
"""

from __future__ import annotations

from tests.simulation.mutant import Mutant, one

BREAKS = [
    # ------------------------------------------------------------ laws 5-7: pins and room
    one(
        "the lease's deadline is ignored",
        5,
        "custody.py",
        "if lease is not None and lease.deadline <= now:",
        "if False:",
    ),
    one(
        "a renewed lease never lapses",
        5,
        "custody.py",
        "        self.ledger.wake_at(lease.deadline, lease.id)\n",
        "",
    ),
    one(
        "a match pins nothing",
        6,
        "custody.py",
        "        for part in parts:\n            self.l1.pin(part.rows)\n",
        "",
    ),
    one(
        "an ended lease does not unpin",
        6,
        "custody.py",
        "        self.ledger.drop_lease(lease)\n        for part in lease.parts:\n"
        "            self.l1.unpin(part.rows)\n",
        "        self.ledger.drop_lease(lease)\n",
    ),
    Mutant(
        "a pinned row is evicted",
        6,
        (
            (
                "rows.py",
                "(self.state[rows] == READY) & (self.pins[rows] == 0)",
                "self.state[rows] == READY",
            ),
            (
                "rows.py",
                '            assert not self.pins[rows].any(), "a pinned row was freed"\n',
                "",
            ),
        ),
    ),
    one(
        "a doomed row is never freed",
        7,
        "l1.py",
        "table.doomed[rows] if ahead else table.doomed[rows] | table.passing[rows]",
        "table.passing[rows]",
    ),
    one(
        "an asker's own prefix is evicted",
        6,
        "flows.py",
        "    protect = state.l1.table.clock\n",
        "    protect = 1 << 60\n",
    ),
    one(
        "the shallower chunk is evicted before the deeper",
        6,
        "l1.py",
        "oldest_first = rows[::-1] if",
        "oldest_first = rows if",
    ),
    one(
        "a lookup does not count as use",
        6,
        "flows.py",
        "            state.l1.touch(one, rows)\n",
        "            pass\n",
    ),
    one(
        "no set is ever handed over",
        6,
        "l1.py",
        "        return bool(chosen)\n",
        "        return False\n",
    ),
    # ------------------------------------------------------------ law 7: quiescence
    one(
        "a dead rank still owes its releases",
        7,
        "custody.py",
        "            self.release(lease, rank)\n",
        "            pass\n",
    ),
    one(
        "a dead rank still owes its commits",
        7,
        "custody.py",
        '            if rank in one.owing:\n                self.discard(one, "writer_lost")\n',
        '            if False:\n                self.discard(one, "writer_lost")\n',
    ),
    one(
        "a dead writer's slots wait for the reservation's deadline",
        7,
        "custody.py",
        "            self.ledger.wake_at(until, one.id)\n",
        "            pass\n",
    ),
    one(
        "who never says Hello stays",
        12,
        "machine.py",
        "in self.state.places.overdue(self.state.now):",
        "in ():",
    ),
    one(
        "who has said nothing gives way to nobody",
        12,
        "places.py",
        "            if other in self._seated and ",
        "            if False and ",
    ),
    one(
        "one user may have all places",
        12,
        "places.py",
        "if self._of_uid[uid] >= self._limits.sessions_per_uid:",
        "if False:",
    ),
    one(
        "who may only look registers",
        12,
        "places.py",
        "        if one.id in self._looking and (lacks := self._lacks(one.uid)):\n",
        "        if lacks := '':\n",
    ),
    one(
        "the daemon's own user may be kept out",
        12,
        "places.py",
        "        if not one.own:\n",
        "        if True:\n",
    ),
    one(
        "a place is not given back",
        12,
        "places.py",
        "        if self._seated.pop(one.id, None) is not None:\n",
        "        if False:\n",
    ),
    one(
        "a session gives way although it registered",
        12,
        "places.py",
        "        if self._looking.pop(one.id, 0) is None:\n",
        "        if False:\n",
    ),
    one(
        "lookups that wait take any memory",
        12,
        "tiers.py",
        "        return self.bytes + size <= limit_bytes and mine + size <= limit_bytes * "
        "INSTANCE_SHARE\n",
        "        return True\n",
    ),
    one(
        "slots wait for ever for the end of a process that has ended",
        7,
        "custody.py",
        "            if until < one.dirty.get(session, 0.0):\n",
        "            if False:\n",
    ),
    one(
        "nobody watches for the end of a process",
        7,
        "machine.py",
        "            if until is not None:\n",
        "            if False:\n",
    ),
    one(
        "a scheduler's loss leaves its leases",
        7,
        "custody.py",
        "            if not lease.handed_over:\n                self.end_lease(lease)",
        "            pass",
    ),
    one(
        "cancelling leaves the ranks owing",
        7,
        "custody.py",
        "        one.owing.clear()\n        self._settle(one, now)\n",
        "        self._settle(one, now)\n",
    ),
    # ------------------------------------------------------------ laws 9-12
    one(
        "another boot is accepted", 9, "checks.py", "    if boot != state.config.boot:", "    if 0:"
    ),
    one(
        "the namespace forgets the layout",
        10,
        "registry.py",
        '                field("layer", layer, page)\n',
        "                pass\n",
    ),
    one(
        "a lost rank leaves its namespace open",
        10,
        "machine.py",
        "        instance.namespace = None if instance.missing else instance.namespace\n",
        "",
    ),
    one(
        "a refusal is not answered",
        11,
        "machine.py",
        "            self._send(session, Error(seq=message.seq, code=no.code, text=no.text))\n",
        "",
    ),
    one(
        "the share is not given back",
        12,
        "leases.py",
        "        left = self.bytes_of[one.instance] - one.size_bytes\n",
        "        left = self.bytes_of[one.instance]\n",
    ),
    one(
        "the share is not enforced",
        12,
        "flows.py",
        "state.quota - state.ledger.bytes_of.get(instance.id, 0)",
        "state.quota",
    ),
    one(
        "one key is granted twice in a message",
        12,
        "flows.py",
        "        lacking[:, columns[repeated(keys[columns])]] = False\n",
        "        pass\n",
    ),
    # ------------------------------------------------------------ layer groups (DESIGN section 4)
    one(
        "a hit may end where a window does not reach",
        4,
        "coverage.py",
        "        reachable &= missing < np.maximum(needed, first)\n",
        "        pass\n",
    ),
    one(
        "a window needs one chunk less than it does",
        4,
        "coverage.py",
        "        needed = group.needs((chunk + 1) * chunk_tokens) // chunk_tokens\n",
        "        needed = group.needs((chunk + 1) * chunk_tokens) // chunk_tokens + 1\n",
    ),
    one(
        "a hit leaves nothing spare",
        4,
        "coverage.py",
        "    end = max(first, end - spare)\n",
        "    spare = 0\n",
    ),
    one(
        "the whole prompt is pinned in every group",
        6,
        "flows.py",
        "        rows = f[begin:chunks]\n",
        "        rows = f[first:chunks]\n",
    ),
    one(
        "a hit that could reach further ends early",
        4,
        "coverage.py",
        "    return first + int(hits[-1]) + 1 if len(hits) else first\n",
        "    return first + int(hits[0]) + 1 if len(hits) else first\n",
    ),
    one(
        "a group's rows are granted as another's chunks",
        3,
        "flows.py",
        "        which=() if all(each == chunks for each in which) else which,\n",
        "",
    ),
    one(
        "windows are written where no full row is",
        6,
        "flows.py",
        "        lacking[~full] &= (~absent | lacking)[full].all(axis=0)\n",
        "        pass\n",
    ),
    one(
        "windows outlive the full row they need",
        6,
        "l1.py",
        '        if one.spec.layout.kind != "full":\n            return\n',
        "        return\n",
    ),
    one(
        "a bad row is dropped by its place in another group",
        8,
        "flows.py",
        "        begin = lease.chunks - len(part.rows)",
        "        begin = 0",
    ),
    one(
        "half a chunk for which there is no room is kept",
        3,
        "flows.py",
        "        _take_back(state, rows[i][kept:])\n",
        "        pass\n",
    ),
]
