"""Which rows of a prompt are retained: whole chunks from its beginning, in all groups."""

from __future__ import annotations

import numpy as np

from kvass import messages as m
from kvass.types import PAGE
from tests.core.rig import Rig, layout


def test_a_chunk_is_retained_in_all_groups_or_in_none() -> None:
    """Two groups with rows of 1 and 2 pages: of a cap of 8 pages two chunks take 6."""
    rig = Rig(pages=32, extent=1, instance_write_share=1.0)
    e = rig.engine(layout=layout(1, 2))
    assert e.store("a", "b", "c", groups=3, keep_s=60).kept == 2
    assert rig.status["l1_kept_bytes"] == 6 * PAGE
    assert rig.count("not_kept_chunks") == 1
    assert e.reserve("a", "b", "c", groups=3, keep_s=60).kept == 2, "they count once"


def test_a_chunk_that_a_prompt_names_twice_is_counted_once() -> None:
    rig = Rig(pages=32)
    e = rig.engine()
    e.store("a", "a", "b", keep_s=60)
    assert rig.status["l1_kept_bytes"] == 2 * PAGE


def test_chunks_that_are_not_there_are_left_out() -> None:
    rig = Rig(pages=32)
    e = rig.engine()
    e.store("a", "b")
    reply = e.lookup("a", "x", "b", keep_s=60)
    assert (reply.chunks, reply.kept) == (1, 1)
    e.give_back(reply.lease)
    kept = rig.machine.state.classes.kept
    assert int(kept.of(np.arange(len(rig.machine.state.rows.table))).sum()) == 1
    assert rig.ask(e.scheduler, m.Reserve(seq=5, items=[], width=8)).grants == []
