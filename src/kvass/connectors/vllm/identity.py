"""Names for what changes the bytes of a KV page: the strings that go into a namespace.

Law of this file: the same model and settings give the same string in every process; what differs
between processes (addresses, set order, ``hash()``) cannot get in, and what cannot be described is
refused, not left out. A model's weights have a file of their own (``weights.py``).
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import huggingface_hub
import msgspec
import torch
from huggingface_hub import constants

from kvass.errors import UsageError

ADAPTER_CONFIG: Final = "adapter_config.json"

MAX_TEXT: Final = 256
PREFIX: Final = 128
"""Characters of a field of an identity, and those that are kept of a longer one."""


class Indescribable(UsageError):
    """A setting that has no name by which another process could know it."""


def canonical(value: object, field: str = "value") -> str:
    """``value`` as JSON: keys and sets sorted, data objects by their fields, module-level functions
    and classes by their qualified names. ``field`` is what an error calls it.

    Raises :class:`Indescribable` for anything else: a lambda, a closure, an object of no known
    fields.
    """
    return json.dumps(_plain(value, field), sort_keys=True, separators=(",", ":"))


def digest(parts: Iterable[str]) -> str:
    """Hex SHA-256 of ``parts``, each length-prefixed so that no two lists run together."""
    state = hashlib.sha256()
    for part in parts:
        raw = part.encode()
        state.update(len(raw).to_bytes(8, "little") + raw)
    return state.hexdigest()


def short(text: str) -> str:
    """A field of an identity: a long text by its beginning, for people, and its digest."""
    if len(text) <= MAX_TEXT:
        return text
    return f"{text[:PREFIX]}... sha256:{digest([text])}"


@dataclasses.dataclass(frozen=True)
class Weights:
    """A LoRA adapter's files. ``content``: what any engine knows them by; ``state`` changes
    whenever one of them does, ``newest_ns`` is when that was last."""

    content: str
    state: str
    newest_ns: int


def adapter_weights(path: str, before: Weights | None = None) -> Weights:
    """The LoRA adapter at the path that vLLM was given: a local folder by the contents of the files
    that vLLM reads of it, anything else by name and commit.

    What is in the state ``before`` is not read again. vLLM fetches the newest commit whenever it
    loads an adapter, amid a step: which one that is can be told beforehand only if it fetches
    nothing. Raises :class:`Indescribable` if it may, OSError if there is nothing to be read.
    """
    folder = Path(os.path.expanduser(path))  # as vLLM: what it cannot expand, it leaves
    if not (path.startswith(("/", "~")) or folder.exists()):
        return _hub_adapter(path)
    now = _adapter_state(folder)
    if before is not None and now == (before.state, before.newest_ns):
        return before
    parts = []
    for file in _adapter_files(folder):
        with file.open("rb") as opened:
            parts += [file.name, hashlib.file_digest(opened, "sha256").hexdigest()]
    if _adapter_state(folder) != now:
        raise OSError("its files are being changed")
    return Weights(digest(["local", *parts]), *now)


def _adapter_files(folder: Path) -> list[Path]:
    return [folder / ADAPTER_CONFIG, *sorted(folder.glob("adapter_model.*"))]


def _adapter_state(folder: Path) -> tuple[str, int]:
    """What changes with the files, or with links on the way to them, and when that was last."""
    files = _adapter_files(folder)
    states = [file.stat() for file in files]
    states += [p.lstat() for p in (folder, *folder.parents, *files) if p.is_symlink()]
    parts = [os.path.realpath(folder), *(file.name for file in files)]
    for state in states:
        parts += [str(state.st_size), str(state.st_mtime_ns), str(state.st_ctime_ns)]
    return digest(parts), max(state.st_ctime_ns for state in states)


def _hub_adapter(name: str) -> Weights:
    if not constants.HF_HUB_OFFLINE:
        raise Indescribable("no local folder; give one, or fetch it and set HF_HUB_OFFLINE")
    found = huggingface_hub.try_to_load_from_cache(name, ADAPTER_CONFIG)
    if not isinstance(found, str):
        raise FileNotFoundError("no local folder, nor was it fetched")
    snapshot = Path(found).parent
    chosen = snapshot.parent.parent / "refs" / "main"
    commit = digest(["hub", name, snapshot.name])
    return Weights(commit, commit, chosen.stat().st_ctime_ns)


def _plain(value: object, field: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value.name if isinstance(value, enum.Enum) else value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return {
            str(_plain(key, field)): _plain(item, f"{field}.{key}") for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_plain(item, f"{field}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, set | frozenset):
        return sorted(canonical(item, field) for item in value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, torch.dtype | Fraction):
        return str(value)
    if isinstance(value, msgspec.Struct):
        return _plain(msgspec.structs.asdict(value), field)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value)]
        return _plain({name: getattr(value, name) for name in names}, field)
    return _name(value, field)


def _name(value: object, field: str) -> str:
    """The qualified name by which any process would import ``value``."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    found: object = sys.modules.get(str(module), None)
    for part in str(name).split("."):
        found = getattr(found, part, None)
    if found is not value or module == "__main__":
        raise Indescribable(
            f"{field}: this {type(value).__name__} has no name in another process; "
            "use plain data, or a function or class at the top of an importable module"
        )
    return f"{module}.{name}"
