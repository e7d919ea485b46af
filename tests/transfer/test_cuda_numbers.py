"""Numbers and structures of CUDA's driver: those of ``kvass.transfer`` are those of ``cuda.h``.

A C compiler reads NVIDIA's ``cuda.h`` (of CUDA 12.8; it comes with Triton's package) and says what
each number and each structure's layout is.
"""

from __future__ import annotations

import ast
import ctypes
import importlib
import inspect
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvass.transfer import cuda_copies, cuda_driver
from tests.transfer.stub_driver import compile_c

NUMBERS = {
    "cuda_driver.LEAST_CUDA": "CUDA_VERSION",
    "cuda_driver._DIRECT_HOST_POINTER": (
        "CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM"
    ),
    "cuda_driver._HOST_PAGE_TABLES": (
        "CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES"
    ),
    "cuda_runtime.NOT_READY": "CUDA_ERROR_NOT_READY",
    "cuda_runtime._NON_BLOCKING": "CU_STREAM_NON_BLOCKING",
    "cuda_runtime._NO_TIMING": "CU_EVENT_DISABLE_TIMING",
    "cuda_runtime._PORTABLE": "CU_MEMHOSTREGISTER_PORTABLE",
    "cuda_runtime._MAPPED": "CU_MEMHOSTREGISTER_DEVICEMAP",
    "cuda_runtime._RELAXED": "CU_STREAM_CAPTURE_MODE_RELAXED",
    "cuda_runtime._MADV_POPULATE_WRITE": "MADV_POPULATE_WRITE",
    "cuda_copies._STREAM_ORDER": "CU_MEMCPY_SRC_ACCESS_ORDER_STREAM",
    "cuda_copies._ANY_ORDER": "CU_MEMCPY_SRC_ACCESS_ORDER_ANY",
}
"""Of each number in Python that is CUDA's or the system's: what it is called in C."""
NOT_CUDAS = {
    "cuda_driver.LEAST_SINGLE",
    "cuda_driver.FATAL",  # errors: test_cuda_runtime.py reads cuda.h for them
    "cuda_runtime._BUSY_CYCLES",
    "cuda_copies.SINGLE_RUNS",
}
STRUCTURES = {
    "cuda_copies._Location": ("CUmemLocation", {"type": "type", "id": "id"}),
    "cuda_copies.Attributes": (
        "CUmemcpyAttributes",
        {
            "order": "srcAccessOrder",
            "source": "srcLocHint",
            "target": "dstLocHint",
            "flags": "flags",
        },
    ),
}
"""Of each structure in Python: its name in C, and those of its fields."""
FUNCTION: Any = cuda_copies.BatchCopy.__base__
"""The base of all types that ``ctypes.CFUNCTYPE`` makes."""
FUNCTION_TYPES = {"cuda_copies.BatchCopy"}
"""Whose calls are proven with all others, below."""


def ctypes_modules() -> list[ModuleType]:
    """The modules of ``kvass.transfer`` that call C."""
    folder = Path(inspect.getfile(cuda_driver)).parent
    names = [f.stem for f in sorted(folder.glob("*.py")) if "import ctypes" in f.read_text()]
    return [importlib.import_module(f"kvass.transfer.{name}") for name in names]


def own_names(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """What the module itself assigns or defines, outside functions: names and values."""
    for node in ast.parse(inspect.getsource(module)).body:
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.ClassDef):
            yield node.name, getattr(module, node.name)
        for name in (x.id for t in targets for x in ast.walk(t) if isinstance(x, ast.Name)):
            yield name, getattr(module, name)


def found(wanted: Callable[[Any], bool]) -> dict[str, Any]:
    """Of all modules that call C: what they have of this kind, by ``module.name``."""
    return {
        f"{module.__name__.rpartition('.')[2]}.{name}": value
        for module in ctypes_modules()
        for name, value in own_names(module)
        if wanted(value)
    }


def is_type(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, type) and issubclass(value, kind)


def layout(structure: Any, name: str, fields: dict[str, str]) -> dict[str, int]:
    """What Python takes for the structure's layout: by the expressions that are this in C.
    Raises KeyError for a field that ``fields`` does not name."""
    said = {f"sizeof({name})": ctypes.sizeof(structure)}
    for field, *_ in structure._fields_:
        in_c, place = fields[field], getattr(structure, field)
        said[f"offsetof({name}, {in_c})"] = place.offset
        said[f"sizeof((({name} *)0)->{in_c})"] = place.size
    return said


def everything_said() -> dict[str, int]:
    """All numbers and layouts that Python has: by the expressions that are this in C."""
    number = found(lambda value: isinstance(value, int | frozenset))
    said = {in_c: number[name] for name, in_c in NUMBERS.items()}
    for name, structure in found(is_type(ctypes.Structure)).items():
        said.update(layout(structure, *STRUCTURES[name]))
    # What batches are made of, in arrays of numpy's: ``U64Array``. What every call returns.
    said["sizeof(CUdeviceptr)"] = said["sizeof(size_t)"] = np.dtype(np.uint64).itemsize
    return {**said, "sizeof(CUresult)": ctypes.sizeof(ctypes.c_int)}


def test_what_python_knows_of_c_is_all_in_these_tables() -> None:
    """Whoever adds a number, a structure or a type of functions proves it here."""
    numbers = found(lambda value: isinstance(value, int | frozenset))
    assert set(numbers) == NUMBERS.keys() | NOT_CUDAS
    assert found(is_type(ctypes.Structure)).keys() == STRUCTURES.keys()
    assert found(is_type(FUNCTION)).keys() == FUNCTION_TYPES
    assert not found(is_type(ctypes.Union))


@pytest.fixture(scope="module")
def cuda_says(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """What the compiler makes of each expression."""
    folder, wanted = tmp_path_factory.mktemp("numbers"), list(everything_said())
    lines = [f'    printf("%lld\\n", (long long)({expression}));' for expression in wanted]
    includes = [f"#include <{name}.h>" for name in ("cuda", "stddef", "stdio", "sys/mman")]
    program = "\n".join([*includes, "int main(void)", "{", *lines, "    return 0;", "}\n"])
    (folder / "numbers.c").write_text(program)
    made = compile_c(folder / "numbers.c", folder / "numbers")
    done = subprocess.run([made], capture_output=True, text=True, timeout=20, check=True)
    return dict(zip(wanted, map(int, done.stdout.split()), strict=True))


def test_every_number_and_every_layout_is_that_of_cuda_h(cuda_says: dict[str, int]) -> None:
    assert everything_said() == cuda_says
