"""``python -m bench.restart``, small; no figure is judged here."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import restart
from bench.rows import Rows


def test_the_first_hit_is_measured(memory_folder: Path) -> None:
    figures = restart.measure(memory_folder, 8192, 1)
    names = {"python_s", "empty_answer_s", "empty_work_s", "hit_s", "adopt_s", "work_s"}
    assert names <= {*figures}
    assert 0 < figures["python_s"] < figures["empty_answer_s"]


def test_a_wrong_row_fails_it(memory_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rows, "holds", lambda *_: False)
    with pytest.raises(AssertionError, match="-1 of 64 rows"):
        restart.measure(memory_folder, 8192, 1)
