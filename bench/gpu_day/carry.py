"""What a bare machine needs for a day, and what this one lacks of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from bench.gpu_day.sizes import (
    CACHES,
    ENGINE_HOST,
    FEW_TOKENS,
    FULL_COPIES,
    FULL_TOKENS,
    GIB,
    L1,
    MOST,
    POOLS,
    Room,
    Sizes,
    engine_bytes,
    fitting,
    found_room,
    in_memory,
    model_bytes,
    shm_needed,
)

ROOT: Final = Path(__file__).parents[2]
CARRY: Final = ROOT / ".cache" / "gpu-day"
MOST_BYTES: Final = 64 << 20
COMPILERS: Final = ("cc", "gcc", "clang")
"""Triton compiles what starts its kernels, on the machine itself."""
TESTS_NEED: Final = (
    "torch",
    "safetensors",
    "transformers",
    "pytest",
    "pytest-timeout",
    "hypothesis",
)
IMPORTED: Final = (
    *("msgspec", "numpy", "prometheus_client", "yaml", "xxhash", "torch", "safetensors"),
    *("transformers", "pytest", "pytest_timeout", "hypothesis", "vllm"),
)
OF_VLLM: Final = (
    *("annotated-types", "apache-tvm-ffi", "cachetools", "cbor2", "compressed-tensors", "fastapi"),
    *("httpcore2", "httpx2", "llguidance", "loguru", "openai", "oss-harmony"),
    *("partial-json-parser", "pybase64", "pydantic", "pydantic-core", "pyzmq", "sniffio"),
    *("starlette", "truststore", "typing-inspection", "xgrammar"),
)
"""What an engine of vLLM 0.33 imports beside what PyTorch's images tend to have."""
JOIN: Final = "/var/tmp/$(basename $WHEEL)"
NOT_NEEDED: Final = "'vllm/vllm-rs' 'vllm/vllm_flash_attn/_vllm_fa2_C*'"
"""Of vLLM's wheel: its servers, and FlashAttention 2. Compute capability 9 has FlashAttention 3."""


def what_to_carry(folder: Path) -> tuple[str, bool]:
    """What a bare machine needs, with sizes, and whether what travels fits into one call. What must
    be in the ignored ``folder`` is wheels. Models have random weights and are made there."""
    tree = sum(file.stat().st_size for file in _tree() if file.is_file())
    carried = {file: file.stat().st_size for file in sorted(folder.rglob("*")) if file.is_file()}
    total = tree + sum(carried.values())
    where = os.path.relpath(folder, ROOT)
    lines = [f"{tree / 2**20:6.1f} MiB  the tree (tracked, and untracked but not ignored)"]
    lines += [f"{n / 2**20:6.1f} MiB  {os.path.relpath(file, ROOT)}" for file, n in carried.items()]
    lines += [f"{total / 2**20:6.1f} MiB  of {MOST_BYTES >> 20} in all"]
    if total > MOST_BYTES:
        lines += ["TOO MUCH for one call: carry parts of it in several, as below"]
    part = max(1, (MOST_BYTES - tree) // 2**20 - 1)
    lines += ["the machine must have:", *(f"  {one}" for one in _needs())]
    lines += [f"packages, there or in {where}/ as wheels (pip install --no-index --no-deps):"]
    lines += [f"  {one}" for one in packages()]
    lines += [
        "vLLM's wheel for CUDA does not fit into one call. Cut it, carry a part a call.",
        "WHEEL is its path, here and there:",
        f"  zip -qd $WHEEL {NOT_NEEDED}    # on Hopper nothing needs these",
        f"  split -b {part}M -d $WHEEL part.    # here; one part.NN at a time into {where}/",
        f"  cat {where}/part.* >> {JOIN}    # there, in order; it stays while the machine is held",
        f"  pip install --no-index --no-deps {JOIN}    # after the last one",
        "A further call goes on where the day's file ends: bring it along, under --out.",
        f"this machine lacks: {'; '.join(lacking()) or 'nothing'}",
        f"here a day would have {fitting(found_room()).said}",
    ]
    return "\n".join(lines), total <= MOST_BYTES


def _tree() -> list[Path]:
    """The files that travel. What travelled has no git."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    git = subprocess.run(listed, cwd=ROOT, capture_output=True, check=False)
    if git.returncode:
        return list(ROOT.rglob("*"))
    return [ROOT / os.fsdecode(name) for name in git.stdout.split(b"\0") if name]


def packages() -> list[str]:
    """What pip must have installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    vllm = "vllm (for most stages; by their symbols 0.33's compiled parts load with torch 2.11)"
    vllm += f", of its own needs {' '.join(OF_VLLM)}"
    return [*project["dependencies"], *TESTS_NEED, vllm, "sglang (for one)"]


def _needs() -> list[str]:
    """With what is enough, and what less will do."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    small, large = (engine_bytes(*one) / GIB for one in reversed(CACHES))
    least, most = (POOLS * L1[n] + count * ENGINE_HOST for n, count in ((-1, 2), (0, MOST)))
    few = FULL_COPIES / GIB * FEW_TOKENS / FULL_TOKENS
    return [
        f"Python {project['requires-python']}",
        f"{MOST * large:.0f} GiB of free GPU memory for {MOST} engines of the large model, "
        f"{2 * small:.0f} for two of the small one, {few:.1f} for copies alone",
        f"{most / GIB:.0f} GiB of host memory, {least / GIB:.0f} for an L1 of {L1[-1] >> 30} GiB",
        f"{model_bytes(Sizes()) / GIB:.1f} GiB for models: in /dev/shm, if as much host memory is "
        "left; else where temporary files are ($TMPDIR)",
        f"a C compiler ({', '.join(COMPILERS)}, or $CC) and Python's headers, for Triton",
        "an NVIDIA driver and nvidia-smi; on AMD free memory is not looked at",
    ]


def lacking() -> list[str]:
    """What this machine lacks, each in a few words."""
    room: Room = found_room()
    sizes = fitting(room)
    wanted = {name: find_spec(name) is not None for name in IMPORTED}
    if wanted["vllm"]:
        wanted |= {f"vLLM's {name}": _installed(name) for name in OF_VLLM}
    found = {
        "Python 3.11": sys.version_info >= (3, 11),
        "a C compiler": bool(os.environ.get("CC")) or any(map(shutil.which, COMPILERS)),
        "Python's headers": Path(sysconfig.get_path("include"), "Python.h").exists(),
        "nvidia-smi": room.gpu is not None,
        "GPU memory for two engines": sizes.most >= 2,
        f"host memory ({room.host / GIB:.1f} GiB free)": room.host
        >= POOLS * sizes.host_bytes + max(1, sizes.most) * ENGINE_HOST,
        f"/dev/shm for vLLM's own offloading ({room.shm / GIB:.1f} GiB free)": room.shm
        >= shm_needed(sizes),
        f"disk for models ({room.disk / GIB:.1f} GiB free)": room.disk >= model_bytes(Sizes())
        or in_memory(sizes, room),
        **wanted,
    }
    return [name for name, there in found.items() if not there]


def _installed(name: str) -> bool:
    with suppress(metadata.PackageNotFoundError):
        return bool(metadata.version(name))
    return False
