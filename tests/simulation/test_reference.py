"""The reference engine over random layer groups, and what it notices."""

from __future__ import annotations

from multiprocessing.pool import Pool
from typing import Any

import pytest

from kvass.core.matching import coverage, prefix
from kvass.layout.spans import Spans
from kvass.types import GroupLayout
from tests.support.reference.engine import run_reference

SEEDS = 60
"""Of each break, at most so many are tried; most are noticed within ten. Without a break none of
hundreds fails, as the first test and the simulator's show."""


def live(seed: int) -> tuple[bool, int, int]:
    """Whether all groups are full ones, and how many loads and promotions there were."""
    world = run_reference(seed)
    return world.all_full, world.loaded, world.promoted


def test_every_loaded_page_is_of_its_tokens_group_layer_and_shard(cores: Pool) -> None:
    worlds = [*cores.map(live, range(1_000_000, 1_000_040), chunksize=5)]
    assert sum(loaded for all_full, loaded, _ in worlds if all_full) > 20
    assert sum(loaded for all_full, loaded, _ in worlds if not all_full) > 48
    assert sum(promoted for _, _, promoted in worlds) > 60


def noticed() -> bool:
    """Whether some seed fails."""
    for seed in range(SEEDS):
        try:
            run_reference(seed)
        except Exception:  # noqa: BLE001 - a wrong page, or a law that the core itself asserts
            return True
    return False


def shifted(self: Spans, group: int, ids: Any, chunk: int) -> Any:
    """A row of blocks one further to the left."""
    one = self._groups[group]
    end = (chunk + 1) * (self._chunk_tokens // one.block_tokens) - 1
    return tuple(ids[max(0, end - one.row_blocks(self._chunk_tokens)) : end])


def short_window(self: GroupLayout, tokens: Any) -> Any:
    """A window that is one token too short."""
    if self.kind == "full":
        return tokens * 0
    if self.kind == "chunked_local":
        return tokens - tokens % self.window_tokens
    first = tokens - (1 if self.kind == "state" else self.window_tokens - 2)
    return first * (first > 0)


def all_of_a_row(self: Spans, *args: Any) -> Any:
    """The load overwrites what the engine has itself."""
    found = REAL_TO_LOAD(self, *args)
    return found and (found[0], (0,) * len(found[1]))


def too_little(self: Spans, *args: Any) -> Any:
    """The load leaves out one block more than it may."""
    found = REAL_TO_LOAD(self, *args)
    return found and (found[0], tuple(s + (len(b) > 1) for b, s in zip(*found, strict=True)))


def any_group(groups: Any, there: Any, *where: Any) -> int:
    """A hit that looks at the first group alone."""
    return coverage.longest_hit(groups[:1], there[:1], *where)


def stale_states(self: Spans, table: Any, states: Any, mask: int, which: Any) -> Any:
    """A state taken from the block table, at the place of the first one."""
    moved = {key: next((i for i in table[key[0]] if i), block) for key, block in states.items()}
    return REAL_TO_STORE(self, table, moved, mask, which)


REAL_TO_LOAD, REAL_TO_STORE = Spans.to_load, Spans.to_store


@pytest.mark.parametrize(
    ("where", "name", "broken"),
    [
        (Spans, "row", shifted),
        (GroupLayout, "needs", short_window),
        (Spans, "to_load", all_of_a_row),
        (Spans, "to_load", too_little),
        (prefix, "longest_hit", any_group),
        (Spans, "to_store", stale_states),
    ],
    ids=lambda x: getattr(x, "__name__", x).split(".")[-1],
)
def test_a_break_is_noticed(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, broken: Any
) -> None:
    monkeypatch.setattr(where, name, broken)
    assert noticed()
