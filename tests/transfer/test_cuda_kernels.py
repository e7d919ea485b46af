"""The kernel moves what a loop would, in Triton's interpreter: odd sizes, strides and counts.

Triton is no requirement of kvass's tests: vLLM's CPU build behaves differently beside it. Where it
can be imported, or ``KVASS_TRITON`` names a folder that has it (``pip install --no-deps --target
DIR triton==3.6.0``), the kernel runs in a process of its own; elsewhere these tests say so.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = os.environ.get("KVASS_TRITON", "")

pytestmark = pytest.mark.skipif(
    not FOLDER and importlib.util.find_spec("triton") is None,
    reason="no triton: set KVASS_TRITON to a folder that has it",
)

PROGRAM = """
import numpy as np, torch
from kvass.transfer import cuda_kernels

def check(rng, runs, longest, break_it=False):
    words = rng.integers(1, longest, runs)
    gap = rng.integers(0, 5, runs)
    room = int((words + gap).sum()) + 8
    source, target = (rng.integers(0, 2**62, room) for _ in "ab")
    expected = target.copy()
    at, to = np.cumsum(words + gap) - words, np.cumsum(words + gap[::-1]) - words
    order = rng.permutation(runs)
    for i in order:
        expected[to[i]:to[i] + words[i]] = source[at[i]:at[i] + words[i]]
    table = np.stack((target.ctypes.data + to * 8, source.ctypes.data + at * 8, words * 8))
    if break_it:
        table[2, -1] -= 8
    cuda_kernels.copy_runs(torch.from_numpy(np.ascontiguousarray(table[:, order], np.int64)))
    return bool((target == expected).all())

rng = np.random.default_rng(3)
for runs, longest in ((1, 2), (1, 3000), (5, 40), (13, 1026), (40, 9), (25, 2310)):
    assert check(rng, runs, longest), (runs, longest)
assert not check(rng, 5, 40, break_it=True)
print("right")
"""


def test_byte_for_byte() -> None:
    path = os.pathsep.join(p for p in (str(ROOT / "src"), FOLDER) if p)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.strip() == "right", done.stderr
