"""What is taken from vLLM without a hook stands in one file, which says what for."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from kvass.connectors.vllm import borrowed, contract

FILE = Path(borrowed.__file__)
FUNCTIONS = {
    node.name: ast.get_docstring(node) or ""
    for node in ast.parse(FILE.read_text()).body
    if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
}
WALKS = re.compile(r"\b(currentframe|_getframe|f_back|f_locals|extract_stack)\b")


PAGE = (Path(__file__).parents[2] / "docs" / "vllm-hooks.md").read_text()
PARTS = re.compile(r"\nNo hook: (.+?)\.\nContract: (``.+?``).*?\nWithout: (.+)\.$", re.S)
METHODS = {term.name.split(".")[-1] for term in contract.terms() if term.rest.startswith("(")}


def replaced(file: Path) -> set[str]:
    """The methods of vLLM that this file assigns to."""
    return {
        node.attr
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    } & METHODS


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_says_why_by_what_contract_and_what_is_without_it(name: str) -> None:
    if name == "weak_reference":
        return  # it takes nothing of vLLM
    text = FUNCTIONS[name]
    assert re.search(r"\nNo hook: .+?\.\nContract: .+?[.;].*?\nWithout: .+\.$", text, re.S), text
    line = text.partition("\nContract: ")[2].partition("\nWithout: ")[0]
    names = {term.name for term in contract.terms()}
    named = re.findall(r"``([\w.]+)``", line)
    assert named or line.startswith("none; blend")
    assert all(one in names or any(n.startswith(f"{one}.") for n in names) for one in named)


def test_the_documentation_says_what_is_without_each() -> None:
    """If this fails, the rows below belong into the page."""
    rows = []
    for found in map(PARTS.search, FUNCTIONS.values()):
        if found is not None:  # what blend takes has no contract
            why, name, without = [" ".join(p.split()).replace("``", "`") for p in found.groups()]
            rows.append(f"| {name} | {why} | {without} |\n")
    assert len(rows) > 12
    assert "".join(rows) in PAGE, "\n" + "".join(rows)


def test_the_documentation_says_since_when_there_is_what_came_later() -> None:
    written = re.findall(r"^\| (`.+`) \| 0\.(3\d) \| .+ \|$", PAGE, re.MULTILINE)
    found = {(name, (0, int(n))) for names, n in written for name in re.findall("`(.+?)`", names)}
    assert found == {(term.name, term.since) for term in contract.terms() if term.since}


def test_no_other_file_looks_at_its_callers_or_replaces_a_method() -> None:
    assert WALKS.search(FILE.read_text())
    assert len(replaced(FILE)) == 7
    for file in FILE.parent.glob("*.py"):
        if file != FILE:
            assert not WALKS.search(file.read_text()), file.name
            assert not replaced(file), file.name
