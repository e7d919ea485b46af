"""Run by ``test_cuda_kernels.py`` where Triton can be imported: the kernel, compiled for real GPUs.

Law of this file: no GPU is needed and nothing runs; what is shown is that Triton's code generator
and ptxas take the kernel, for each kind of arguments with which it is launched. Prints
``{case: "compiled" | an error}``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvass.transfer import cuda_kernels

WARP = 32


def compiled(capability: int, runs: str) -> str:
    """``runs``: of which type the number of runs is."""
    signature = {"table": "*i64", "runs": runs, "lanes": "constexpr"}
    aligned: Any = {(0,): [["tt.divisibility", 16]]}
    source = ASTSource(
        cuda_kernels._copy_runs, signature, {(2,): cuda_kernels.LANES}, attrs=aligned
    )
    try:
        made = triton.compile(source, target=GPUTarget("cuda", capability, WARP))
    except Exception as e:  # noqa: BLE001 - a boundary: Triton's compiler raises anything
        return f"{type(e).__name__}: {e}"
    if not made.asm["cubin"]:
        return "no machine code"
    ptx = made.asm["ptx"]
    return "compiled" if "st.global" in ptx and "ld.global" in ptx else "moves nothing"


if __name__ == "__main__":
    sys.stdout.write(
        json.dumps(
            {
                **{f"sm_{n}": compiled(n, "i32") for n in (80, 90, 100)},
                "one variant": str(
                    [p.name for p in cuda_kernels._copy_runs.params if not p.do_not_specialize]
                ),
            }
        )
    )
