"""How much of it a day does, and what that needs: of the GPU, of the host, of the disk.

A machine with less gets smaller models, fewer engines at once and less host memory. What was chosen
is a fact of the day (``Sizes.said``): figures of other sizes are another column of the page. A
later call keeps it, as long as it fits. Else its file takes over what no size changes (``SIZED``).
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec

from tests.support.vllm.models import TINY, Shape, tensors_of

GIB: Final = 1 << 30
SHM: Final = "/dev/shm"
LARGE: Final = Shape(
    vocab=32_000,
    hidden=3072,
    intermediate=8192,
    layers=28,
    heads=24,
    kv_heads=8,
    head_dim=128,
    max_tokens=65_536,
)
"""Llama-3.2-3B, but for its vocabulary: 112 KiB of KV per token."""
SMALL: Final = msgspec.structs.replace(LARGE, hidden=2048, layers=16, heads=32, head_dim=64)
"""Llama-3.2-1B: 32 KiB of KV per token."""
SHORT: Final = msgspec.structs.replace(
    LARGE, hidden=1024, intermediate=2816, layers=80, heads=8, kv_heads=1
)
"""KV as one of eight ranks of Llama-3-70B has it: pages of 8 KiB, 40 KiB per token."""
CACHES: Final = ((LARGE, 6 * GIB), (SMALL, 2 * GIB))
"""Models, and how much KV an engine has of them. The largest of which two engines fit is taken."""
ENGINE_GPU: Final = 2 * GIB
"""Of an engine, beside weights and KV: its context, graphs, what it computes with."""
ENGINE_HOST: Final = 4 * GIB
MOST: Final = 4
L1: Final = (16 * GIB, 8 * GIB, 4 * GIB, 2 * GIB, GIB)
POOLS: Final = 3
"""As large as L1: itself, and the host memory of vLLM's own offloading in two engines."""
FULL_TOKENS, FEW_TOKENS = 4096, 1024
FULL_COPIES: Final = 6 * GIB
"""What ``bench.gpu`` needs for ``FULL_TOKENS``."""
ARGS: Final[dict[str, Any]] = {
    "dtype": "bfloat16",
    "block_size": 16,
    "max_model_len": 34_000,
    "max_num_batched_tokens": 8192,
    "max_num_seqs": 16,
    "gpu_memory_utilization": 0.05,
    "enforce_eager": False,
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16],
    },
}


SMALL_CACHE: Final = {"kv_cache_memory_bytes": 128 << 20}
"""On a CPU vLLM asks for 1 GiB by default, and does not start where other programs have it."""


class Room(msgspec.Struct, frozen=True):
    """The bytes that are free. ``gpu`` None: unknown, and taken for enough. ``disk``: where
    temporary files are."""

    gpu: int | None
    host: int
    shm: int
    disk: int


class Sizes(msgspec.Struct, frozen=True):
    """On a GPU. ``crowd`` requests at once, each of ``crowds`` tokens: of the last ones the
    engine's cache does not hold all. Lengths are a multiple of the block and one more: all find as
    much, and compute one token. ``most``: engines at once."""

    shape: Shape = LARGE
    short_shape: Shape = SHORT
    block: int = 16
    args: dict[str, Any] = msgspec.field(
        default_factory=lambda: ARGS | {"kv_cache_memory_bytes": CACHES[0][1]}
    )
    most: int = MOST
    host_bytes: int = L1[0]
    tokens: int = FULL_TOKENS
    rounds: int = 5
    warm_up: tuple[int, ...] = (3000, 9000)
    verified: int = 18
    kinds: tuple[str, ...] = ("kvass", "native", "blocks", "native_in_step")
    lengths: tuple[int, ...] = (513, 2049, 8193, 32_001)
    usual: int = 2049
    crowd: int = 16
    crowds: tuple[int, ...] = (513, 2049, 4001)
    small: tuple[int, ...] = (32, 128, 512, 2048)
    short_lengths: tuple[int, ...] = (2049, 8193)
    decoders: int = 8
    answer: int = 200
    newcomer: int = 4001
    sample: int = 8
    twins: tuple[int, ...] = (700, 1500, 3000)

    @property
    def said(self) -> str:
        """In a few words, which tell all choices apart."""
        weights = weight_bytes(self.shape) / 2e9
        return (
            f"{self.most} engines of {weights:.1f} B weights, L1 of {self.host_bytes / GIB:.3g} GiB"
            f", copies of {self.tokens} tokens"
        )


SMOKE: Final = Sizes(
    shape=TINY,
    short_shape=TINY,
    block=32,
    args={
        "block_size": 32,
        "max_model_len": 1536,
        "max_num_batched_tokens": 512,
        "num_gpu_blocks_override": 64,
        **SMALL_CACHE,
    },
    most=100,
    host_bytes=128 << 20,
    tokens=64,
    rounds=1,
    warm_up=(),
    lengths=(513,),
    usual=513,
    crowd=4,
    crowds=(577,),
    small=(512,),
    short_lengths=(257,),
    decoders=2,
    answer=24,
    newcomer=257,
    sample=2,
    twins=(400,),
)


@cache
def weight_bytes(shape: Shape) -> int:
    """In bfloat16."""
    return 2 * sum(math.prod(one.size) for one in tensors_of(shape))


def engine_bytes(shape: Shape, cache: int) -> int:
    """What an engine takes of the GPU."""
    return weight_bytes(shape) + cache + ENGINE_GPU


def model_bytes(sizes: Sizes) -> int:
    """What the models' files take: those that engines run."""
    return (weight_bytes(sizes.shape) + weight_bytes(sizes.short_shape)) * bool(sizes.most)


def fitting(room: Room, said: str = "") -> Sizes:
    """The sizes for a machine: those that an earlier call ``said``, if they fit. With less room
    than one small engine takes ``most`` is 0."""
    fit = [one for one in _choices() if fits(one, room)] or [*_choices()][-1:]
    return next((one for one in fit if one.said == said), fit[0])


def agree(said: str, other: str, fields: tuple[str, ...]) -> bool:
    """Whether the sizes of two calls have the same in these fields."""
    known = {one.said: [getattr(one, name) for name in fields] for one in _choices()}
    return said in known and known[said] == known.get(other)


def fits(sizes: Sizes, room: Room) -> bool:
    """Whether a machine has enough for these sizes, and a place for their models."""
    cache_bytes = sizes.args["kv_cache_memory_bytes"]
    engine = max(engine_bytes(one, cache_bytes) for one in (sizes.shape, sizes.short_shape))
    gpu = max(sizes.most * engine, FULL_COPIES if sizes.tokens == FULL_TOKENS else 0)
    placed = model_bytes(sizes) <= room.disk or in_memory(sizes, room)
    return (room.gpu is None or gpu <= room.gpu) and host_needed(sizes) <= room.host and placed


def host_needed(sizes: Sizes) -> int:
    """Host memory, without models."""
    return POOLS * sizes.host_bytes + sizes.most * ENGINE_HOST


def in_memory(sizes: Sizes, room: Room) -> bool:
    """Whether there is room for the models in memory, beside all else."""
    models = model_bytes(sizes)
    return shm_needed(sizes) + models <= room.shm and host_needed(sizes) + models <= room.host


def shm_needed(sizes: Sizes) -> int:
    """The host memory of vLLM's own offloading, which does not start if it is not free there."""
    return (POOLS - 1) * sizes.host_bytes


def _choices() -> Iterator[Sizes]:
    """From the best to the least. The large model is worth it for two engines."""
    for (shape, cache_bytes), least in zip(CACHES, (2, 0), strict=True):
        args = ARGS | {"kv_cache_memory_bytes": cache_bytes}
        for most in range(MOST, least - 1, -1):
            for host_bytes in L1:
                for tokens in (FULL_TOKENS, FEW_TOKENS):
                    yield Sizes(
                        shape=shape, args=args, most=most, host_bytes=host_bytes, tokens=tokens
                    )


def found_room() -> Room:
    """What this machine has."""
    shm, disk = (
        shutil.disk_usage(one).free if os.access(one, os.W_OK) else 0
        for one in (SHM, tempfile.gettempdir())
    )
    return Room(_gpu(), host_bytes(), shm, disk)


def _gpu() -> int | None:
    ask = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits", "--id=0"]
    try:
        said = subprocess.run(ask, capture_output=True, text=True, check=True).stdout
        return int(said) << 20
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None


def host_bytes(group: Path = Path("/sys/fs/cgroup")) -> int:
    """What the kernel can give; in a container that has a limit no more than that. Pages of files
    can be given: a container counts them as used."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(one.split()[1]) << 10 for one in lines if one.startswith("MemAvailable"))
    for folder, limit, used, files in (
        (group, "memory.max", "memory.current", ("active_file", "inactive_file")),
        (
            group / "memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            ("total_active_file", "total_inactive_file"),
        ),
    ):
        with suppress(OSError, ValueError):  # no such file, or "max"
            left = int((folder / limit).read_text()) - int((folder / used).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            free = min(free, left + sum(int(stat.get(one, 0)) for one in files))
    return free


def place(room: Room, sizes: Sizes | None, temporary: str) -> str:
    """Where models and sockets go: into memory, if there is room for the models. None: tiny ones,
    which are elsewhere."""
    return SHM if room.shm and (sizes is None or in_memory(sizes, room)) else temporary
