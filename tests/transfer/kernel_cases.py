"""Run by ``test_cuda_kernels.py`` where Triton can be imported: what the kernel did, as JSON.

``cases``: in Triton's interpreter, what it moved. All of both buffers is compared with what a loop
moves, so every byte outside the runs is a guard byte. ``compile``: whether Triton and ptxas take it
for real GPUs. Prints ``{case: "right" | "wrong" | "compiled" | an error}``.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvass.errors import UsageError
from kvass.layout.copy_plan import plan_copy
from kvass.layout.describe import GroupPlanes, Plane
from kvass.transfer import cuda_kernels
from kvass.transfer.descriptors import KERNEL_UNIT, Runs, choose, plan_runs
from kvass.transfer.runtime import Kind, Region
from kvass.types import I64Array

LANES = cuda_kernels.LANES


def buffer(rng: np.random.Generator, size: int) -> np.ndarray:
    return rng.integers(0, 256, size, np.uint8)


def launch(target: I64Array, source: I64Array, count: I64Array, programs: int) -> None:
    table = np.ascontiguousarray(np.stack((target, source, count)), np.int64)
    cuda_kernels.copy_runs(torch.from_numpy(table), programs)


def runs(words: list[int], gaps: list[int], programs: int = 12, spoil: int = 0) -> bool:
    """Runs of ``words`` words with ``gaps`` between them, other gaps on the other side, shuffled.

    ``spoil``: bytes by which the last run's length is wrong.
    """
    rng = np.random.default_rng(len(words))
    size, gap = np.array(words, np.int64) * KERNEL_UNIT, np.resize(gaps, len(words)) * KERNEL_UNIT
    room = int((size + gap).sum()) + 64
    source, target = buffer(rng, room), buffer(rng, room)
    expected, before = target.copy(), source.copy()
    at, to = np.cumsum(size + gap) - size, np.cumsum(size + gap[::-1]) - size
    for a, t, n in zip(at.tolist(), to.tolist(), size.tolist(), strict=True):
        expected[t : t + n] = source[a : a + n]
    order = rng.permutation(len(words))
    size[-1:] += spoil
    launch(target.ctypes.data + to[order], source.ctypes.data + at[order], size[order], programs)
    return bool((target == expected).all() and (source == before).all())


def plan(kind: Kind, pages: list[int], pad: int, skip: int, swap: bool = False) -> bool:
    """A copy plan over strided planes, by the descriptors that the mover would make; what the
    kernel must not take goes by a loop. ``swap``: two blocks of it are mistaken for each other."""
    rng = np.random.default_rng(pad + 7 * skip)
    blocks, chunk, planes, at = 23, 4, [], 24
    for page in pages:
        planes.append(Plane(at, page + pad, page))
        at = planes[-1].end(blocks) + 8
    group = GroupPlanes(0, tuple(planes), blocks, chunk)
    region, arena = buffer(rng, at + 16), buffer(rng, 5 * group.shard_bytes + 8)
    ids = rng.permutation(np.arange(1, blocks))[: 5 * chunk].reshape(5, chunk)
    slots = rng.permutation(5) * group.shard_bytes
    expected = [region.copy(), arena.copy()]
    for nth, (row, slot) in enumerate(zip(ids.tolist(), slots.tolist(), strict=True)):
        for plane, inside in zip(planes, group.slot_offsets(), strict=True):
            for i in range(0 if nth else skip, chunk):
                here, there = (
                    plane.base + row[i] * plane.block_stride,
                    slot + inside + i * plane.run,
                )
                ends = expected[0][here : here + plane.run], expected[1][there : there + plane.run]
                ends[kind == "store"][:] = ends[kind == "load"]
    if swap:
        ids[1, [0, 1]] = ids[1, [1, 0]]
    address, taken = Region(region.ctypes.data, region.nbytes), 0
    made = plan_copy(group, ids, slots, skip=skip)
    for some in plan_runs((made,), [address], 3 * group.shard_bytes + 8):
        for way, part in choose(
            some, kind, np.ones(len(some), np.bool_), {"store": 1 << 20, "load": 1 << 20}
        ):
            taken += len(part) if way == "kernel" else 0
            move(kind, way == "kernel", part, arena)
    fits = all(n % KERNEL_UNIT == 0 for n in [*pages, pad])
    assert taken or not fits, "the kernel was given nothing"
    return bool((region == expected[0]).all() and (arena == expected[1]).all())


def move(kind: Kind, by_kernel: bool, part: Runs, arena: np.ndarray) -> None:
    host = part.host + arena.ctypes.data
    target, source = (host, part.device) if kind == "store" else (part.device, host)
    if by_kernel:
        launch(target, source, part.count, 12)
        return
    for to, at, n in zip(target.tolist(), source.tolist(), part.count.tolist(), strict=True):
        ctypes.memmove(to, at, n)


def refused(column: int, by: int) -> bool:
    """Whether one number of a table that is off by ``by`` is refused, and nothing was moved."""
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    table = np.array([[target.ctypes.data] * 2, [source.ctypes.data] * 2, [16, 32]], np.int64)
    table[column, 1] += by
    try:
        cuda_kernels.copy_runs(torch.from_numpy(table))
    except UsageError:
        return not target.any()
    return False


ODD = [1, 3, 7, LANES - 1, LANES, LANES + 1, 2 * LANES + 5, 511, 2, 1025]
CASES: dict[str, Callable[[], bool]] = {
    "no runs": lambda: runs([], []),
    "one word": lambda: runs([1], [0]),
    "one long run": lambda: runs([3 * LANES + 1], [1]),
    "odd sizes, odd gaps": lambda: runs(ODD, [0, 1, 3, 5]),
    "odd sizes, no gaps": lambda: runs(ODD, [0]),
    "fewer runs than programs": lambda: runs([5, 1, 9], [1], programs=12),
    "runs for each program": lambda: runs([3] * 12, [1], programs=12),
    "one more": lambda: runs([3] * 13, [1, 2], programs=12),
    "many runs": lambda: runs([1 + i % 9 for i in range(200)], [0, 3], programs=12),
    "one program": lambda: runs(ODD, [1], programs=1),
    "many programs": lambda: runs(ODD, [1], programs=97),
    "runs of no bytes between others": lambda: runs([4, 0, 5, 0], [1]),
    "load, odd strides": lambda: plan("load", [24, 8, 1032], 8, 0),
    "store, odd strides": lambda: plan("store", [24, 8, 1032], 8, 0),
    "load, within a chunk": lambda: plan("load", [72, 72, 72], 40, 3),
    "store, dense pages": lambda: plan("store", [4096, 4096], 0, 1),
    "load, dense pages": lambda: plan("load", [4096, 4096], 0, 1),
    "load, pages of odd bytes": lambda: plan("load", [24, 7, 100], 8, 1),
    "load, strides of odd bytes": lambda: plan("load", [24, 24], 3, 1),
    "refused: a length": lambda: refused(2, 4),
    "refused: a target": lambda: refused(0, 1),
    "refused: a source": lambda: refused(1, -2),
    "control: a run too short": lambda: runs(ODD, [1], spoil=-8),
    "control: a run too long": lambda: runs(ODD, [1], spoil=8),
    "control: two blocks swapped": lambda: plan("load", [24, 8, 1032], 8, 0, swap=True),
}


def outcome(case: Callable[[], bool]) -> str:
    try:
        return "right" if case() else "wrong"
    except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError) as e:
        return f"{type(e).__name__}: {e}"


# ---------------------------------------------------------------- for real GPUs


def compiled(capability: int, runs: str) -> str:
    """``runs``: of which type the number of runs is."""
    signature = {"table": "*i64", "runs": runs, "lanes": "constexpr"}
    aligned: Any = {(0,): [["tt.divisibility", 16]]}
    source = ASTSource(
        cuda_kernels._copy_runs, signature, {(2,): cuda_kernels.LANES}, attrs=aligned
    )
    try:
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    except Exception as e:  # noqa: BLE001 - a boundary: Triton's compiler raises anything
        return f"{type(e).__name__}: {e}"
    if not made.asm["cubin"]:
        return "no machine code"
    ptx = made.asm["ptx"]
    return "compiled" if "st.global" in ptx and "ld.global" in ptx else "moves nothing"


def all_compiled() -> dict[str, str]:
    parameters = cuda_kernels._copy_runs.params
    return {
        **{f"sm_{n}": compiled(n, "i32") for n in (80, 90, 100)},
        "one variant": str([p.name for p in parameters if not p.do_not_specialize]),
    }


if __name__ == "__main__":
    said = all_compiled() if sys.argv[1] == "compile" else {n: outcome(c) for n, c in CASES.items()}
    sys.stdout.write(json.dumps(said))
