"""Whether the Python of one version of vLLM fits the compiled parts of another one.

``python -m tests.support.vllm.compiled NEW FROM BUT``, with ``NEW`` first on ``PYTHONPATH``. Both
are folders with a package ``vllm``; the compiled parts in ``NEW`` are copies of those in ``FROM``.
``requirements/overlays.sh`` makes them, and names in ``BUT`` the operations that may differ, with
commas between them. If the two do not fit, the exit status is 1, and the last line says why:

- The compiled parts can be loaded, and all that engines and servers import is there.
- Each call of a compiled operation gives it arguments that it takes.
- An operation that is called in code for CPUs, and was not called in ``FROM``, exists.

What an operation computes is not looked at: the engines of ``make test-versions`` show that.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.support.vllm.fake_vllm import version_of

IMPORTED: Final = (
    "vllm._custom_ops",
    "tests.support.vllm.preloaded",
    "vllm.entrypoints.openai.api_server",
)
_MARK: Final = "torch.ops._"


class OperationCall(NamedTuple):
    """A call of a compiled operation. ``place``: its file and line. ``given``: the number of its
    arguments without a name, and the names of the others; None if they are only known when it
    runs. ``of_cpu``: the file, the function around it or the operation has ``cpu`` in its name."""

    operation: str
    place: str
    given: tuple[int, tuple[str, ...]] | None
    of_cpu: bool


def calls(package: Path) -> Iterator[OperationCall]:
    """The calls in all files of ``package``."""
    for file in sorted(package.rglob("*.py")):
        text = file.read_text(errors="replace")
        if _MARK in text:
            inner = str(file.relative_to(package))
            yield from _calls(ast.parse(text), inner, of_cpu="cpu" in inner)


def _calls(node: ast.AST, file: str, *, of_cpu: bool) -> Iterator[OperationCall]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        of_cpu |= "cpu" in node.name.lower()
    if isinstance(node, ast.Call) and (name := ast.unparse(node.func)).startswith(_MARK):
        _, _, library, operation, *_ = *name.split("."), ""
        words = tuple(word.arg or "**" for word in node.keywords)
        known = "**" not in words and not any(isinstance(one, ast.Starred) for one in node.args)
        given = (len(node.args), words) if known else None
        of_cpu_too = of_cpu or "cpu" in operation
        yield OperationCall(f"{library}::{operation}", f"{file}:{node.lineno}", given, of_cpu_too)
    for child in ast.iter_child_nodes(node):
        yield from _calls(child, file, of_cpu=of_cpu)


def misfits(new: Path, before: Path, but: Collection[str] = ()) -> list[str]:
    """A line for each call in the package ``new`` that the compiled parts do not serve, and that
    ``before`` does not make: what is for GPUs alone is not served there either. They are loaded,
    and are those of the package ``before``. Operations in ``but`` are not looked at."""
    known = {(call.operation, call.given) for call in calls(before)}
    operations = {operation for operation, _ in known}
    if not any(map(_schemas, operations)):
        return ["they cannot be loaded"]  # vLLM has logged why
    found = []
    for call in calls(new):
        if call.operation in but or call.given is None or (call.operation, call.given) in known:
            continue
        if schemas := _schemas(call.operation):
            if not any(_takes(one, *call.given) for one in schemas):
                found.append(f"{call.place} gives {call.operation} other arguments than it takes")
        elif call.of_cpu and call.operation not in operations:
            found.append(f"{call.place} calls {call.operation}, which they do not have")
    return found


def _schemas(operation: str) -> list[Any]:
    import torch

    found: list[Any] = torch._C._jit_get_schemas_for_operator(operation)
    return found


def _takes(schema: Any, positional: int, words: tuple[str, ...]) -> bool:
    """Whether an operation can be called with so many arguments, and with those of these names."""
    places = [one.name for one in schema.arguments if not one.kwarg_only]
    rest = {one.name for one in schema.arguments} - set(places[:positional])
    needed = {one.name for one in schema.arguments if not one.has_default_value()}
    return positional <= len(places) and needed & rest <= set(words) <= rest


def _why_not(new: Path, before: Path, but: Collection[str]) -> str:
    try:
        file = Path(str(importlib.import_module("vllm.platforms").__file__)).resolve()
        assert file.is_relative_to(new), "another vLLM is first on the path"
        for module in IMPORTED:
            importlib.import_module(module)
    except Exception as problem:  # noqa: BLE001 - an operation that is not there is no ImportError
        return f"{type(problem).__name__}: {problem}".splitlines()[0]
    first, *more = [*misfits(new / "vllm", before / "vllm", but), ""]
    return f"{first} (and {len(more) - 1} more)" if more[1:] else first


def why_not(new: Path, before: Path, but: Collection[str] = ()) -> str:
    """A line that says why the two folders do not fit; empty if they do."""
    if not (why := _why_not(new, before, but)):
        return ""
    versions = [version_of(folder / "vllm") for folder in (new, before)]
    parts = "the Python of vLLM {} does not fit the compiled parts of {}".format(*versions)
    return f"{parts}: {why}"


if __name__ == "__main__":
    folders = [Path(folder).resolve() for folder in sys.argv[1:3]]
    sys.exit(why_not(folders[0], folders[1], sys.argv[3].split(",")) or 0)
