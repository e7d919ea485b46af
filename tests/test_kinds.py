"""A kind of layer groups is one class: nothing else decides by its name."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from kvass import kinds
from kvass.core.matching.coverage import longest_hit
from kvass.kinds import KINDS, GroupKind, Kind, Tokens
from kvass.layout.spans import Spans
from kvass.types import GroupLayout, chunk_blocks

SOURCES = Path(kinds.__file__).parent
CHUNK = 64


def named(tree: ast.Module) -> list[str]:
    """Where something that is called a kind is compared with the name of one."""
    return [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        and {getattr(n, "value", None) for n in ast.walk(node) if isinstance(n, ast.Constant)}
        & {*KINDS}
        and "kind" in ast.unparse(node)
    ]


def test_no_file_decides_by_the_name_of_a_kind() -> None:
    assert named(ast.parse("if group.kind in ('full', 'state'): pass"))
    for file in SOURCES.rglob("*.py"):
        assert not named(ast.parse(file.read_text())), file


def test_each_name_has_a_class() -> None:
    assert tuple(KINDS) == get_args(GroupKind)


class Beginning(Kind):
    """A kind that there is not: a hit of more than one chunk needs nothing of it."""

    def needs(self, tokens: Tokens, window_tokens: int) -> Tokens:
        return tokens * (tokens > CHUNK)

    def kept(self, chunk_tokens: int, window_tokens: int) -> int:
        return chunk_tokens


def test_a_new_kind_is_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "state", Beginning())
    first, full = (GroupLayout(kind, 16, ("a",), (100,)) for kind in ("state", "full"))
    everywhere, nowhere, later = np.ones(4, np.bool_), np.zeros(4, np.bool_), np.arange(4) > 0
    assert longest_hit([full, first], [everywhere, nowhere], CHUNK, 0) == 4
    assert longest_hit([full, first], [later, nowhere], CHUNK, 0) == 0
    assert chunk_blocks([full, full], CHUNK) == 4
    assert chunk_blocks([full, first], CHUNK) == 0
    assert Spans([full, first], CHUNK).row_blocks() == (4, 4)
    assert Spans([full, first], CHUNK).storable([[1, 2, 3, 4], [1, 2, 3, 4]], {}, 0) == 3
    assert first.rules.oldest_first(np.arange(3)).tolist() == [0, 1, 2]
    assert full.rules.oldest_first(np.arange(3)).tolist() == [2, 1, 0]
