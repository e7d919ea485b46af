"""Engines whose layer groups need less than the whole prompt, for tests."""

from __future__ import annotations

from kvass.types import PAGE, GroupLayout, RankLayout
from tests.core.rig import Engine, Rig

CHUNK = 16


def group(kind: str, window: int = 0, pages: int = 1) -> GroupLayout:
    """Blocks of 4 tokens, whose page takes ``pages`` pages: 4 to a whole chunk."""
    return GroupLayout(kind, 4, ("a",), (pages * PAGE,), window)  # type: ignore[arg-type]


FULL, STATE = group("full"), group("state")
SHORT, LONG = group("sliding_window", 8), group("sliding_window", 40)  # 2 blocks; 3 chunks


def engine(*groups: GroupLayout, pages: int = 256, share: float = 1.0) -> Engine:
    rig = Rig(pages, extent=8, instance_write_share=share)
    return rig.engine(layout=RankLayout(groups), chunk_tokens=CHUNK)


def rows(e: Engine) -> list[int]:
    return [g["rows"] for g in e.rig.status["namespaces"][0]["groups"]]
