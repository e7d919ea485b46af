"""The kernel moves what a loop would, in Triton's interpreter: odd sizes, strides and counts.
It compiles for real GPUs, too.

Triton must not be importable beside vLLM's CPU build, which behaves differently then: so ``make
setup`` puts it into a folder of its own, and ``kernel_cases.py`` runs in a process that sees it.
Without it these tests fail.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CASES = Path(__file__).with_name("kernel_cases.py")
NAMES = [line.split('"')[1] for line in CASES.read_text().splitlines() if '": lambda: ' in line]


def triton_folder() -> str:
    """Where Triton is, for PYTHONPATH; empty if it can be imported as it is."""
    folder = Path(os.environ.get("KVASS_TRITON") or Path(sys.prefix) / "triton")
    if (folder / "triton" / "__init__.py").is_file():
        return str(folder)
    if importlib.util.find_spec("triton") is not None:
        return ""
    pytest.fail(
        f"no Triton in {folder}: run `make setup`, or set KVASS_TRITON to a folder made by "
        "`pip install --no-deps -r requirements/triton.txt --target FOLDER`",
        pytrace=False,
    )


def run_with_triton(what: str, **more: str) -> dict[str, str]:
    """What ``kernel_cases`` prints, in a process that can import Triton."""
    path = os.pathsep.join(p for p in (str(ROOT / "src"), triton_folder()) if p)
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(CASES), what],
        env={**env, **more, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """What became of each case, in one process with Triton's interpreter."""
    return run_with_triton("cases", TRITON_INTERPRET="1")


def test_it_compiles_for_gpus(tmp_path: Path) -> None:
    """The interpreter takes more than the compiler does. A cache of its own: else an old result
    would stand for a new failure."""
    assert run_with_triton("compile", TRITON_CACHE_DIR=str(tmp_path)) == {
        "sm_80": "compiled",
        "sm_90": "compiled",
        "sm_100": "compiled",
        "one variant": "['table', 'lanes']",
    }


@pytest.mark.parametrize("name", NAMES)
def test_byte_for_byte(outcomes: dict[str, str], name: str) -> None:
    assert outcomes[name] == ("wrong" if name.startswith("control") else "right")


def test_no_case_is_left_out(outcomes: dict[str, str]) -> None:
    assert set(outcomes) == set(NAMES)
