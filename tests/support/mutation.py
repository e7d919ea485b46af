"""Mutation testing: breaks of a source file made by rule, each judged by the tests of that file.

``python -m tests.support.mutation FILE...`` prints the survivors, which are the breaks that these
tests do not notice. ``make mutants`` does it for the files that differ from main. A survivor is a
missing test or a break that changes nothing.

Own, because mutmut and cosmic-ray judge all files by one command and write each break to disk: here
a file's own tests must notice, and a break is in memory only.
"""

from __future__ import annotations

import ast
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, Final

from tests.support import processes
from tests.support.mutants import ROOT, SOURCE, Mutant, break_package, unit_tests

SWAPPED: Final[dict[type[ast.AST], type[ast.AST]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr,
}
UNTOUCHED: Final = {"annotation", "returns", "decorator_list"}
"""Fields of the syntax tree. Annotations are not evaluated, so a break of one changes nothing."""
LOGGING: Final = ("log.", "logger.", "warnings.")
MEMORY: Final = 8 << 30
"""A break may allocate without an end."""
UNMEASURED_S: Final = 300.0


# ---------------------------------------------------------------- breaks


def _broken(field: str, node: ast.AST) -> ast.AST | None:
    """What replaces ``node``, which is in ``field`` of its parent; None: nothing does."""
    match node:
        case _ if type(node) in SWAPPED:
            return SWAPPED[type(node)]()
        case ast.UnaryOp(op=ast.Not()):
            return node.operand
        case ast.Constant(value=bool() | int() as value):
            return ast.Constant(not value if isinstance(value, bool) else value + 1)
        case ast.Name() | ast.Attribute() | ast.Call() if field == "test":
            return ast.UnaryOp(ast.Not(), node)
        case ast.Expr(value=ast.Call()) if not ast.unparse(node).startswith(LOGGING):
            return ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.Return(value=None):
            return ast.Pass()
        case ast.AugAssign() | ast.Raise() | ast.Continue() | ast.Break() | ast.Delete():
            return ast.Pass()
    return None


def _breaks(tree: ast.AST, parent: ast.AST, line: int) -> Iterator[str]:
    """Make each break of ``parent`` in ``tree``, say where and what it is, and undo it."""
    for field, value in ast.iter_fields(parent):
        nodes = value if isinstance(value, list) else [value]
        for place, node in enumerate(nodes):
            if not isinstance(node, ast.AST) or field in UNTOUCHED or _is_check(node):
                continue
            here = getattr(node, "lineno", line)
            if new := _broken(field, node):
                alone = isinstance(node, ast.stmt) or isinstance(parent, ast.arguments)
                old = _first_line(node if alone else parent)
                _put(parent, field, place, new)
                yield f"{here}: {old}  ->  {_first_line(new if alone else parent)}"
                _put(parent, field, place, node)
            yield from _breaks(tree, node, here)


def _is_check(node: ast.AST) -> bool:
    """Whether it is only there to find defects, so that no behaviour depends on it."""
    only_checks = isinstance(node, ast.keyword) and node.arg in ("strict", "frozen")
    return only_checks or isinstance(node, ast.Assert)


def _put(parent: ast.AST, field: str, place: int, node: ast.AST) -> None:
    if isinstance(value := getattr(parent, field), list):
        value[place] = node
    else:
        setattr(parent, field, node)


def _first_line(node: ast.AST) -> str:
    return ast.unparse(node).partition("\n")[0][:90]


def mutants(file: Path) -> list[Mutant]:
    """All breaks of ``file``, by line."""
    text = file.read_text()
    tree = ast.parse(text)
    return [
        Mutant(f"{file.name}:{name}", edits=[(file.name, text, ast.unparse(tree))])
        for name in _breaks(tree, tree, 0)
    ]


# ---------------------------------------------------------------- judging


def judges_of(file: Path) -> list[str]:
    """The tests of a file of the package: those with its name, else those that import it, else all
    of its folder."""
    module = ".".join(file.relative_to(SOURCE).with_suffix("").parts)
    folder = ROOT / "tests" / module.split(".")[1]
    named = [folder / f"test_{by}{file.stem}.py" for by in ("", "scheduler_")]
    named.append(folder / "scripts" / f"{file.stem}.txt")
    imported = re.compile(rf"\b{re.escape(module)}\b|from kvass\S* import .*\b{file.stem}\b")
    own = [one for one in named if one.exists()] or [
        one for one in sorted(folder.glob("test_*.py")) if imported.search(one.read_text())
    ]
    return [str(one.relative_to(ROOT)) for one in own or [folder]]


def _judge(mutant: Mutant, package: str, tests: list[str]) -> None:
    """Exit status 1 if a test notices. Breaks this process."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    break_package(mutant, package)
    sys.exit(bool(unit_tests("-m", "not engine", *tests)))


def survives(mutant: Mutant, package: str, tests: list[str], most_s: float) -> bool:
    """Whether no test notices ``mutant``. A break that hangs or ends its process is noticed."""
    context = get_context("forkserver")
    context.set_forkserver_preload(processes.PRELOADED[:3])
    process: Any = context.Process(target=_judge, args=(mutant, package, tests))
    process.start()
    process.join(most_s)
    if process.exitcode is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
    return bool(process.exitcode == 0)


def survivors(file: Path, tests: list[str], chosen: list[Mutant]) -> list[str]:
    """The names of those of ``chosen`` that ``tests`` do not notice.

    Raises:
        ValueError: the tests fail without a break.
    """
    package, began_s = ".".join(file.relative_to(SOURCE).parts[:2]), time.monotonic()
    text = file.read_text()
    unbroken = Mutant("unbroken", edits=[(file.name, text, ast.unparse(ast.parse(text)))])
    if not survives(unbroken, package, tests, UNMEASURED_S):
        raise ValueError(f"{tests} fail without a break")
    most_s = 20 + 10 * (time.monotonic() - began_s)
    with ThreadPool(processes.cores()) as pool:
        alive = pool.map(lambda one: survives(one, package, tests, most_s), chosen, chunksize=1)
    return [one.name for one, lives in zip(chosen, alive, strict=True) if lives]


def main(files: list[str]) -> int:
    """Print the survivors of each file; 1 if there are any."""
    found = 0
    for file in (Path(name).resolve() for name in files):
        tests, made = judges_of(file), mutants(file)
        left = survivors(file, tests, made)
        head = f"{file.relative_to(SOURCE)}: {len(left)} of {len(made)} survive {' '.join(tests)}"
        print("\n  ".join([head, *left]), flush=True)  # noqa: T201
        found += len(left)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
