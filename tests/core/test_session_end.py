"""The end of a session with many rows: in slices, and the least recently used rows join first."""

from __future__ import annotations

import numpy as np
import pytest

from kvass.core.rows.session_end import SLICE, SessionEnd
from kvass.core.rows.session_tags import LOOK
from kvass.types import I64Array
from tests.core.rows import Rows, spec

ROWS = 40_000


class Joined(Rows):
    """``ROWS`` rows of the session 7, last used in a random order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(ROWS, ROWS // 16)
        self.row_class = self.classes.add(spec(), namespace=0)
        self.all = self.store(self.row_class, *range(1, ROWS + 1), session=7)
        self.use(np.random.default_rng(2).permutation(self.all))
        self.slices = list[I64Array]()
        evict_first = self.row_class.order.evict_first

        def joins(rows: I64Array) -> None:
            self.slices.append(rows)
            evict_first(rows)

        monkeypatch.setattr(self.row_class.order, "evict_first", joins)

    def use(self, rows: I64Array, session: int | None = None) -> None:
        self.rows.touch(self.row_class, rows, session)

    def end(self) -> SessionEnd:
        self.followers.tags.end(7, self.classes.tenants.default.id)
        return SessionEnd((1, 1), 7, self.classes.tenants.default.id)

    def next_to_go(self) -> list[int]:
        return [int(row) for row in self.row_class.order.first()]


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Joined:
    return Joined(monkeypatch)


def test_no_slice_has_many_rows_and_all_go_in_the_order_of_their_last_use(joined: Joined) -> None:
    end = joined.end()
    steps = 1
    while not end.go_on(joined.rows, joined.followers.tags):
        steps += 1
    parts = -(-ROWS // SLICE)
    assert max(map(len, joined.slices)) <= SLICE + 64 * parts
    assert steps <= 2 * parts + 2
    assert end.rows == ROWS
    order = np.argsort(joined.rows.table.stamp[joined.all])
    assert joined.next_to_go() == joined.all[order].tolist()


def test_few_rows_are_found_at_a_time(joined: Joined, monkeypatch: pytest.MonkeyPatch) -> None:
    tags, found = joined.followers.tags, list[int]()
    rows_of = tags.rows_of

    def counted(session: int, begin: int, most: int) -> tuple[I64Array, int]:
        rows, end = rows_of(session, begin, most)
        found.append(len(rows))
        return rows, end

    monkeypatch.setattr(tags, "rows_of", counted)
    end = joined.end()
    while not end.go_on(joined.rows, joined.followers.tags):
        pass
    assert sum(found) == ROWS
    assert max(found) < SLICE + LOOK


def test_what_is_used_or_freed_meanwhile_does_not_join(joined: Joined) -> None:
    end = joined.end()
    while not joined.slices:
        end.go_on(joined.rows, joined.followers.tags)
    last = joined.all[np.argsort(joined.rows.table.stamp[joined.all])][-10:]
    joined.use(last[:5], session=8)
    joined.rows.free(last[5:], "capacity")
    while not end.go_on(joined.rows, joined.followers.tags):
        pass
    assert end.rows == ROWS - 10
    assert not np.isin(joined.next_to_go(), last).any()


def test_none_joins_once_the_session_goes_on(joined: Joined) -> None:
    end = joined.end()
    while len(joined.slices) < 2:
        end.go_on(joined.rows, joined.followers.tags)
    joined.followers.tags.resume(7)
    assert end.go_on(joined.rows, joined.followers.tags)
    assert end.rows == len(joined.next_to_go()) < ROWS
