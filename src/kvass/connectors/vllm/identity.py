"""Names for what changes the bytes of a KV page: the strings that go into a namespace.

Law of this file: the same model and settings give the same string in every process; what differs
between processes (addresses, set order, ``hash()``) cannot get in. Weights are known by where they
lie and by the names, sizes and modification times of their files: reading them would take minutes.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec


def canonical(value: object) -> str:
    """``value`` as JSON: keys and sets sorted, objects by their fields or their type's name."""
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"))


def digest(parts: Iterable[str]) -> str:
    """Hex SHA-256 of ``parts``, each length-prefixed so that no two lists run together."""
    state = hashlib.sha256()
    for part in parts:
        raw = part.encode()
        state.update(len(raw).to_bytes(8, "little") + raw)
    return state.hexdigest()


def local_weights(path: Path) -> str:
    """Identity of the weights at ``path``, a folder or a file: any changed file changes it.

    ``config.json`` counts by content, every other file by name, size and modification time. Raises
    OSError if it cannot be read.
    """
    parts = [os.path.realpath(path)]
    for file in _files(path):
        state = file.stat()
        parts += [str(file.relative_to(path)), str(state.st_size), str(state.st_mtime_ns)]
    config = path / "config.json"
    if config.is_file():
        parts.append(hashlib.sha256(config.read_bytes()).hexdigest())
    return digest(parts)


def _files(path: Path) -> Iterator[Path]:
    """Every file that could hold weights, in a fixed order: caches and hidden files come and go."""
    if path.is_file():
        yield path
        return
    for file in sorted(path.rglob("*")):
        inner = file.relative_to(path).parts
        hidden = any(part.startswith(".") or part == "__pycache__" for part in inner)
        if not hidden and file.is_file():
            yield file


def _plain(value: object) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value.name if isinstance(value, enum.Enum) else value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(canonical(item) for item in value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, msgspec.Struct):
        return _plain(msgspec.structs.asdict(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    named = value if callable(value) else type(value)
    return f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', '')}"
