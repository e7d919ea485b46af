"""Each invariant sees its own break, made by hand in a state that holds a little of everything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec
import numpy as np
import pytest

from kvass import messages as m
from kvass.core.effects import TierLoad, TierProbe, TierStore
from kvass.core.rows.row_table import FREE, LOADING, READY, WRITING
from kvass.core.state import State
from kvass.types import GroupLayout, RankLayout
from tests.core.rig import WIDTH, Rig, digests
from tests.core.tier_rig import TierRig

BLOCKS: Final = RankLayout((GroupLayout("full", 4, ("a",), (1024,)),))


def in_use() -> Rig:
    """One engine has a lease on two rows, writes two and waits for one that a tier loads. A chunk
    is indexed, and a row is being stored in the tier. Of another engine a cleared row is read."""
    rig = TierRig(pages=64, extent=4, instance_write_share=1.0)
    e = rig.ready(layout=BLOCKS)
    rig.only_in_tiers(e, "t")
    old = rig.engine("old", identity={"model": "old"})
    old.store("c")
    old.lookup("c")
    rig.say(old.scheduler, m.Clear(seq=11))
    rig.answer_all()
    e.store("a", "b", blocks=digests(0, 1, 2, "a", 4, 5, 6, "b"))
    e.lookup("a", "b")
    tokens = np.arange(16, dtype="<u4").tobytes()
    message = m.IndexChunks(seq=8, space=b"", tokens=tokens, digests=digests("a"), width=WIDTH)
    assert rig.ask(e.scheduler, message).chunks == 1
    e.reserve("w", "v")
    rig.begin(e, "t")
    rig.answer_all(TierProbe)
    assert rig.open_ops(TierLoad)
    assert rig.open_ops(TierStore)
    return rig


def row_in(state: State, number: int) -> int:
    """The first row that is in a state."""
    return int(np.flatnonzero(state.rows.table.state == number)[0])


def first(entries: dict[Any, Any]) -> Any:
    return next(iter(entries.values()))


def free_slot_twice(state: State) -> None:
    free = next(c.free for c in state.classes.by_id.values() if len(c.free))
    free.give_back(free.listed()[:1])


def index_forgets(state: State) -> None:
    row_class = next(c for c in state.classes.by_id.values() if c.rows[READY])
    rows = row_class.index.rows()
    row_class.index.remove(rows[state.rows.table.state[rows] == READY])


def overlapping_extents(state: State) -> None:
    sets = state.classes.extents.sets
    one, other = [*sets.values()][:2]
    sets[one.id] = msgspec.structs.replace(one, bases=other.bases)


def one_more(of: Callable[[State], Any], name: str) -> Callable[[State], None]:
    """Counts one more under ``name``."""

    def change(state: State) -> None:
        counted = of(state)
        if isinstance(counted, dict):
            counted[name] += 1
        else:
            setattr(counted, name, getattr(counted, name) + 1)

    return change


def at(column: str, state_number: int, value: int) -> Callable[[State], None]:
    """Writes ``value`` into a column of the first row in a state."""

    def change(state: State) -> None:
        getattr(state.rows.table, column)[row_in(state, state_number)] = value

    return change


BREAKS: Final[list[tuple[Callable[[State], None], str]]] = [
    (lambda s: first(s.leases.all).owing.clear(), "a lease that nobody owes"),
    (lambda s: setattr(first(s.leases.all), "deadline", s.now), "a lease outlived"),
    (lambda s: first(s.reservations.all).owing.clear(), "a settled reservation"),
    (one_more(lambda s: s.reservations.bytes_of, "e"), "reserved bytes were miscounted"),
    (at("loader", WRITING, 99), "names another writer"),
    (at("state", READY, WRITING), "in transit belongs to no reservation"),
    (at("pins", READY, 5), "rows count the pins"),
    (at("loader", LOADING, 99), "filled by another operation"),
    (lambda s: first(s.promotions.all).awaits.clear(), "waits for what it does not use"),
    (one_more(lambda s: s.promotions.bytes_of, "e"), "miscounted bytes"),
    (one_more(lambda s: s.tiers.all[0], "storing_bytes"), "flushed bytes were miscounted"),
    (one_more(lambda s: s.tiers.all[0], "queued_rows"), "a queue miscounts"),
    (one_more(lambda s: s.tiers.all[0], "place"), "tiers have places"),
    (lambda s: first(s.namespaces).tier_epochs.append(3), "a tier has no epoch's column"),
    (overlapping_extents, "two extents overlap"),
    (one_more(lambda s: s.classes.extents._bytes, "total"), "arena bytes were lost"),
    (at("key", FREE, 3), "a FREE row keeps a key"),
    (at("stamp", FREE, 3), "a FREE row keeps a stamp"),
    (at("set_of", READY, 7), "a row left its set"),
    (free_slot_twice, "a slot is free and used, twice free, or lost"),
    (index_forgets, "a READY row is lost"),
    (at("stamp", READY, -1), "eviction cannot see"),
    (one_more(lambda s: s.classes.sets, "cleared"), "cleared sets were miscounted"),
    (one_more(lambda s: s.classes.sets, "held"), "what holds a set was miscounted"),
    (one_more(lambda s: s.classes.sets, "used"), "the rows of a set were miscounted"),
    (one_more(lambda s: s.rows, "pinned"), "pins were miscounted"),
    (lambda s: s.classes.sets.newest.fill(0), "a set seems older than its rows"),
    (one_more(lambda s: first(s.classes.by_id), "slots"), "a class miscounts its slots"),
    (one_more(lambda s: s.tenants.default, "taken_bytes"), "a tenant is miscounted"),
    (one_more(lambda s: s.counters, "l1_in_bytes"), "bytes in, out and there disagree"),
    (one_more(lambda s: first(s.namespaces).traffic, "lookup_tokens"), "hits and misses disagree"),
    (lambda s: first(s.instances).connections.clear(), "an instance without connections"),
    (lambda s: first(s.instances).workers.clear(), "a rank is missing"),
    (one_more(lambda s: first(s.followers.segments.sizes).matcher, "count"), "entries were mis"),
]


def test_a_state_in_use_keeps_every_invariant() -> None:
    in_use().machine.validate()


@pytest.mark.parametrize(("change", "says"), BREAKS, ids=[says for _, says in BREAKS])
def test_a_break_is_seen_and_named(change: Callable[[State], None], says: str) -> None:
    rig = in_use()
    change(rig.machine.state)
    with pytest.raises(AssertionError, match=says):
        rig.machine.validate()
